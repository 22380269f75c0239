"""From text to batches.

Begin with `prepare.py`: it reads a corpus (`corpus.py`, `text.py`), trains tokenizers (`tokenizer.py`), drops unusable
pairs, and writes the rest as token ids once. Training opens the result with `prepared_corpus.py`, and plans and loads
batches with `batching.py`. `bpe_dropout.py` draws random segmentations, and `word_alignment.py` groups pieces into
words and links words. `demo.tsv.gz` is the built-in corpus.
"""
