"""The network: embeddings, encoder, decoder, output layer, and several models as one.

Begin with `seq2seq.py`, then `encoder.py` and `decoder.py`; `state.py` is what a decoder carries from step to step and
multiplies with, `prediction.py` what it predicts, `latent.py` decoding with a latent position. `build.py` makes a model
from a configuration, `checkpoints.py` from a file.
"""
