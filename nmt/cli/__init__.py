"""The six commands. Only this package imports Hydra.

Begin with `entry.py`, which the installed commands call, then read the command itself: `train.py`, `translate.py`,
`evaluate.py` (with nmt-compare), `serve.py` or `export.py`. `run_command.py` runs a command and turns an error into one
line and an exit status. `compose.py` parses a command line and composes the typed configuration from it, for nmt-train
that of a new or of a resumed run. `config_files.py` lists what the YAML files in configs/ offer, for --help and for
messages, and `hydra_errors.py` words the errors of Hydra. `sweep.py` runs several jobs through Hydra,
`optuna_sweeper.py` chooses the values of a sweep's jobs, and `launch.py` starts several processes. `python_api.py`
offers training, evaluation and comparison as functions.
"""
