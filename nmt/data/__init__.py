"""From text to batches.

Begin with `prepare.py`: it reads a corpus (`corpus.py`, `text.py`), drops training pairs with a blank side (`raw.py`),
trains tokenizers (`tokenizer.py`), encodes the pairs and drops training pairs by length (`encoding.py`), and writes the
result once. Training opens it with `prepared.py`, and plans and loads batches with `batching.py`. `bpe_dropout.py`
draws random segmentations, and `word_alignment.py` groups pieces into words and links words. `demo.tsv.gz` is the
built-in corpus.
"""
