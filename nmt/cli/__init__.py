"""The six commands, and the only room that knows Hydra.

Begin with `entry.py`, which the installed commands call, then read the command itself: `train.py`, `translate.py`, or
`commands.py` for the others. `app.py` starts Hydra, hands the typed configuration to the command and turns errors into
one line and an exit status. `compose.py` reads the command line, `help.py` words errors and --help, `sweep.py` runs
several jobs (`optuna_sweeper.py` searches), `launch.py` several processes.
"""
