"""Training a run.

Begin with `job.py` (prepare, build, fit, evaluate), then `trainer.py` (an update) and `loop.py` (what happens between
updates). `losses.py` is what is minimised, `start.py` where the initial weights come from, `checkpoint.py` what a run
resumes from, `journal.py` where numbers and pictures go, `graphs.py` records CUDA graphs.
"""
