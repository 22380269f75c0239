"""The six commands, and the only room that knows Hydra.

Begin with `entry.py`, which the installed commands call, then read the command itself: `train.py`, `translate.py`,
`evaluate.py`, `compare.py`, `serve.py`, `export.py`. `app.py` starts Hydra and hands the typed configuration to the
command, `outcome.py` turns errors into one line and an exit status, `sweep.py` runs several jobs, `launch.py` several
processes.
"""
