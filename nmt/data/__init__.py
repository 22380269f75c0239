"""From text to batches.

Begin with `prepare/prepare.py`: a corpus is read (`reading/`), filtered, tokenised (`tokenizer.py`) and written once,
in two passes. Training opens the result by `prepared.py`, plans an epoch by `planning.py` and loads batches by
`batching.py`. `demo/` is the built-in corpus, `word_alignment.py` the words of pieces and their links.
"""
