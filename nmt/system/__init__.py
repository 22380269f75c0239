"""The machine that nmt runs on, and the directory of a run.

Begin with `run.py`, which defines every file of a run. `files.py` writes atomically and opens archives. `machine.py`
chooses device and precision and lets waiting threads sleep. `processes.py` starts worker processes and reads how this
process was started, `distributed.py` exchanges results between processes. `text_table.py` formats tables of results.
"""
