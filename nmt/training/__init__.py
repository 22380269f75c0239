"""The training loop.

Begin with `job.py` (prepare, build, train, evaluate), then `trainer.py` and `step.py`. `losses/` is what is
minimised, `logs/` where numbers and pictures go, `best.py` which weights a run keeps, `graphs.py` records CUDA
graphs.
"""
