"""Decoding with a latent source position: mixtures over positions, their posterior, an inference network."""
