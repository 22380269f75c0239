"""From text to batches.

Begin with `prepare.py`: a corpus is read (`corpus.py`, `text.py`), filtered, tokenised (`tokenizer.py`) and written
once, in two passes (`passes.py`). Training opens the result by `prepared.py`, and plans and loads batches by
`batching.py`. `demo.py` is the built-in corpus, `word_alignment.py` the words of pieces and their links.
"""
