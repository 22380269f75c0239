"""This machine and the directory of a run.

Begin with `run.py`, which knows every file of a run. `files.py` writes atomically and opens archives, `machine.py`
chooses device and precision and lets waiting threads sleep, `processes.py` and `distributed.py` join several processes,
`text_table.py` formats results.
"""
