"""The network: embeddings, encoder, decoder, output layer, and several models as one.

Begin with `seq2seq.py`, then `encoder.py` and `decoder.py`; `state.py` is what a decoder carries from step to step,
`stepping.py` how a search drives a model, `latent/` decoding with a latent position. `build.py` makes a model from a
configuration, `load.py` from a checkpoint.
"""
