"""The six commands. Only this package imports Hydra.

Begin with `entry.py`, which the installed commands call, then read the command itself: `train.py`, `translate.py`, or
`commands.py` for the others. `app.py` starts Hydra, hands the typed configuration to the command and turns errors into
one line and an exit status. `compose.py` reads the command line, and `help.py` words errors and --help. `sweep.py` runs
several jobs, `optuna_sweeper.py` chooses the values of a sweep's jobs, and `launch.py` starts several processes.
"""
