"""This machine and the directory of a run.

Begin with `run.py`, which knows every file of a run. `files.py` writes atomically, `saved_config.py` reads
configurations as data, `archive.py` opens packed runs, `machine.py` chooses device and precision, `processes.py` and
`distributed.py` join several processes, `contention.py` makes waiting threads sleep.
"""
