"""The network: embeddings, encoder, decoder, output layer, and several models as one.

Begin with `seq2seq.py`, then `recurrent.py` (the encoder) and `decoder.py`; `prediction.py` is what a decoder predicts,
`latent.py` decoding with a latent position. `build.py` makes a model and its attention from a configuration,
`checkpoints.py` loads one from a file.
"""
