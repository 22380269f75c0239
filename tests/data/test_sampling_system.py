"""A run whose segmentations are drawn, in two processes: the same weights, to the bit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY


@pytest.mark.slow
def test_two_processes_end_in_the_same_weights(tmp_path: Path) -> None:
    weights: list[dict[str, Any]] = []
    for name, sampling in (("one", 0.1), ("again", 0.1), ("without", 0.0)):
        run = tmp_path / name
        cache = {"NMT_CACHE": str(tmp_path / f"{name} cache")}  # prepared anew: the tokenizer must be the same, too
        given = [*TINY, f"tokenizer.sampling={sampling}", "training.max_steps=6", f"hydra.run.dir={run}"]
        command = [sys.executable, "-c", "from nmt.cli.train import main; main()", *given]
        subprocess.run(command, env=os.environ | cache, capture_output=True, check=True)
        weights.append(torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"])
    one, again, without = weights
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not all(torch.equal(one[name], without[name]) for name in one)
