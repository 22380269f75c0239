"""From text to batches.

Begin with `prepare.py`: it reads a corpus (`corpus.py`, `text.py`), filters it (`raw.py`), trains tokenizers
(`tokenizer.py`), encodes it (`encoding.py`) and writes it once. Training opens the result with `prepared.py`, and plans
and loads batches with `batching.py`. `bpe_dropout.py` draws random segmentations, and `word_alignment.py` groups pieces
into words and links words. `demo.tsv.gz` is the built-in corpus.
"""
