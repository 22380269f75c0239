"""The code for GPUs, run on CUDA tensors without data: devices, waits for the device, kernels per step.

These tests say nothing about results and speed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.config.checks import config_dir

HERE = Path(__file__).parent
MOST_KERNELS = 42, 60  # limits per target step, forward and backward, which monotonic attention and entmax need in bf16
LATENT = {"marginal", "posterior", "variational", "hard_monotonic"}
SLOWER = {"fertility", "gaussian_mixture", "linear_chain", "mocha"}  # need more kernels
PRESETS = sorted({path.stem for path in (config_dir() / "attention").glob("*.yaml")} - LATENT - SLOWER)
EVERYTHING = (
    "embedding.word_dropout=0.1 decoder.lexical=true decoder.fixnorm=true decoder.bridge=mean "
    "encoder/self_attention=attention training.guided_alignment=0.2"
)
for side in ("encoder", "decoder"):
    EVERYTHING += f" {side}=lstm {side}.layers=2 {side}.residual=true"
# Configurations whose passes a graph records, except those that draw numbers per sentence or read other models.
RECORDED = [
    EVERYTHING + " attention=nematus",
    EVERYTHING + " attention=multihead attention/score=additive attention/coverage=linear",
    *(f"attention={name}" for name in sorted(LATENT)),
]
NOT_RECORDED = [
    "objective=distillation objective.teachers=[run]",
    "attention=hard",
]
BEAM = {"translate/beam.py, _best: copy to the host": 1}
WAITS = {  # search method -> the waits of one step
    "greedy": {"translate/sampling.py, rollout: copy to the host": 1},
    "beam": BEAM,
    "ensemble": BEAM,  # all its models read the same tokens
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile fake_cuda.cpp once for all test workers."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if torch.version.cuda is not None or sys.platform != "linux":
        pytest.skip("needs a Linux build of torch without CUDA")
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fake_cuda.so"
    folder = Path(torch.__file__).parent
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.so")
        places = [f"-I{folder}/include", f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-lc10", "-ltorch_cpu"]
        command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O1", str(HERE / "fake_cuda.cpp"), "-o", str(part)]
        subprocess.run([*command, *places], check=True)
        part.replace(path)
    return path


def check(library: Path, cases: list[str], precision: str = "bf16") -> list[dict[str, Any]]:
    """Check the waits: an update waits only to learn whether its gradient is finite, a step of a search only for the
    tokens that it chose, and recorded work neither waits nor copies."""
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)])
    command = [sys.executable, str(HERE / "run_on_fake_cuda.py"), *(f"{case} precision={precision}" for case in cases)]
    environment = {**os.environ, "PYTHONPATH": paths, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(cases)
    for result in results:
        assert {place.rpartition(":")[0] for place in result["update waits"]} == {"training/trainer.py, update"}
        assert all(search["waits of a step"] == WAITS[name] for name, search in result["searches"].items())
        assert not result["recorded transfers"]
    return results


def test_training_and_search_stay_on_the_device(library: Path) -> None:
    (result,) = check(library, ["attention=nematus"])
    assert result["forward kernels"] <= 14
    assert result["backward kernels"] <= 22


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_every_preset_stays_on_the_device(precision: str, library: Path) -> None:
    for result in check(library, [f"attention={name}" for name in PRESETS], precision):
        if precision == "bf16":
            assert result["forward kernels"] <= MOST_KERNELS[0], result["case"]
            assert result["backward kernels"] <= MOST_KERNELS[1], result["case"]


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "recorded"), [(RECORDED, True), (NOT_RECORDED, False)])
def test_every_objective_and_regulariser_stays_on_the_device(cases: list[str], recorded: bool, library: Path) -> None:
    assert {result["recorded transfers"] is not None for result in check(library, cases)} == {recorded}
