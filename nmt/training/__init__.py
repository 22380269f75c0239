"""Train a run.

Begin with `job.py` (prepare, build, fit, evaluate), then `trainer.py` (a single update) and `loop.py` (logging,
validation and checkpoints between updates). `losses.py` computes the objective, `validation.py` scores the validation
split, `start.py` loads initial parameters and teachers, `checkpoint.py` checks checkpoints and records signals to stop,
`journal.py` writes numbers and pictures, and `graphs.py` records CUDA graphs. `dry_run.py` estimates what a run costs.
"""
