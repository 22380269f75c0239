"""A run packed into one file.

Begin with `contents.py`, which chooses what goes into the archive; `card.py` fills in the model card.
"""
