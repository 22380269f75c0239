"""Train a run.

Begin with `job.py` (set up, fit, evaluate), then `trainer.py` (a single update) and `loop.py` (logging, validation and
checkpoints between updates). `losses.py` computes the objective, `optimizer.py` has optimizers and schedules,
`validation.py` scores the validation split, `stopping.py` ends a run early, `other_runs.py` loads initial weights and
teachers, `journal.py` writes numbers and pictures, `corpus_report.py` reports on the corpus, and `cuda_graphs.py`
records CUDA graphs. `dry_run.py` times a run before it is made, and `utilisation.py` measures how well training uses
its device.
"""
