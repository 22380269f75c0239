"""The six commands. Only this package imports Hydra.

Begin with `entry.py`, which the installed commands call, then read the command itself: `train.py`, `translate.py`, or
`commands.py` for the others. `app.py` runs a command and turns an error into one line and an exit status. `compose.py`
composes the typed configuration from the command line, `explain.py` words the errors of Hydra, and `help.py` prints
--help. `start.py` decides what a new or a resumed run starts with, `sweep.py` runs several jobs through Hydra,
`optuna_sweeper.py` chooses the values of a sweep's jobs, and `launch.py` starts several processes. `python.py` offers
training, evaluation and comparison as functions.
"""
