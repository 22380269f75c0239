"""From text to batches.

Begin with `prepare.py`: it reads a corpus (`corpus.py`, `text.py`), filters it, tokenises it (`tokenizer.py`) and
writes it once, in two passes (`passes.py`). Training opens the result with `prepared.py`, and plans and loads batches
with `batching.py`. `bpe_dropout.py` draws random segmentations, and `word_alignment.py` groups pieces into
words and links words. `demo.tsv.gz` is the built-in corpus.
"""
