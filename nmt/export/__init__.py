"""Packs a run into one file, an archive.

Begin with `contents.py`, which chooses what goes into the archive and fills in the model card from `card.md`.
"""
