"""The network: embeddings, encoder, decoder, output layer, and ensembles of several models.

Begin with `seq2seq.py`, then read `recurrent.py`, which has the encoder, and `decoder.py`. `output.py`
computes the distribution of the next token, and `latent.py` decodes with a latent source position. `build.py` builds a
model and its attention from a configuration, and `checkpoints.py` saves checkpoints and loads models from them.
"""
