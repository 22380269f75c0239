"""The path of a GPU, on CUDA tensors without data: devices, waits for the device, kernels per step. Says nothing about
numbers and speed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
# Kernels of a target step at most, forward and backward, in bf16, by preset, with further choices.
KERNELS = {
    "none": (0, 0),
    "bahdanau": (13, 19),
    "nematus": (14, 22),
    "gnmt": (0, 7),
    "luong_dot": (13, 15),
    "luong_dot decoder=lstm": (13, 14),
    "luong_general": (13, 15),
    "luong_concat": (17, 22),
    "luong_location": (16, 17),
    "luong_local_m": (27, 17),
    "luong_local_p": (32, 33),
    "scaled_dot": (14, 16),
    "multihead": (18, 19),
    "ntm_cosine": (23, 43),
    "chorowski": (24, 40),
    "coverage": (19, 32),
    "sparsemax": (30, 25),
    "entmax": (40, 23),
    "hard": (36, 30),
    "gumbel": (31, 24),
    "monotonic": (35, 60),
}
EVERYTHING = (
    "variational_dropout=true embedding.word_dropout=0.1 decoder.lexical=true decoder.fixnorm=true decoder.bridge=mean "
    "encoder/self_attention=attention training.guided_alignment=0.2"
)
for side in ("encoder", "decoder"):
    EVERYTHING += f" {side}=lstm {side}.layers=2 {side}.residual=true {side}.zoneout=0.1 {side}.weight_drop=0.1"
    EVERYTHING += f" {side}.recurrent_dropout=0.1 {side}.layer_norm=true {side}.transition_depth=1"
OBJECTIVES = [
    "objective=distillation objective.teachers=[run]",
    "training.r_drop=1 training.scheduled_sampling=0.3 decoder.copy=true",
    EVERYTHING + " attention=nematus",
    EVERYTHING + " attention=multihead attention/score=additive attention/coverage=linear",
]
WAITS = {  # of a step
    "greedy": {"translate/search/rollout.py, _rollout: copy to the host": 1},
    "beam": {"translate/search/beam.py, _rank: copy to the host": 1},
    "ensemble": {"translate/search/beam.py, _rank: copy to the host": 1},  # its models read the same tokens
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fake_cuda.cpp, compiled; workers share it."""
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


def run(library: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)])
    command = [sys.executable, str(HERE / "run_on_fake_cuda.py"), *cases]
    environment = {**os.environ, "PYTHONPATH": paths, "LD_PRELOAD": str(library)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def results(library: Path, *cases: str) -> list[dict[str, Any]]:
    done = run(library, *cases)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def places(waits: dict[str, int]) -> set[str]:
    return {place.rpartition(":")[0] for place in waits}


def assert_waits_only_where_it_must(result: dict[str, Any]) -> None:
    """An update asks once whether its gradient is finite, a step of a search which tokens it has chosen."""
    assert places(result["update waits"]) == {"training/step.py, __call__"}
    for name, search in result["searches"].items():
        assert search["waits of a step"] == WAITS[name]


# Between them, these have local windows, heads, coverage, sampling and a past.
TYPICAL = ["nematus", "luong_dot decoder=lstm", "luong_local_p", "multihead", "coverage", "hard", "monotonic"]


@pytest.mark.parametrize(
    "names",
    [TYPICAL, pytest.param([name for name in KERNELS if name not in TYPICAL], marks=pytest.mark.slow)],
    ids=["typical", "rest"],
)
def test_every_preset_stays_on_the_device(names: list[str], library: Path) -> None:
    for name, result in zip(names, results(library, *(f"attention={n} precision=bf16" for n in names)), strict=True):
        assert_waits_only_where_it_must(result)
        assert result["recorded transfers"] == (None if name == "hard" else [])
        forward, backward = KERNELS[name]
        assert result["forward kernels"] <= forward, name
        assert result["backward kernels"] <= backward, name


@pytest.mark.parametrize(
    "chosen", [slice(2, 3), pytest.param(slice(None), marks=pytest.mark.slow)], ids=["most", "all"]
)
def test_every_objective_and_regulariser_stays_on_the_device(chosen: slice, library: Path) -> None:
    cases = OBJECTIVES[chosen]
    for case, result in zip(cases, results(library, *(f"{case} precision=bf16" for case in cases)), strict=True):
        assert "ensemble" in result["searches"]
        assert result["recorded transfers"] == ([] if case.startswith(EVERYTHING) else None)
        assert_waits_only_where_it_must(result)


LATENT = ["attention=marginal", "attention=posterior", "attention=variational", "attention=hard_monotonic"]


@pytest.mark.parametrize(
    "cases", [LATENT[:2], pytest.param(LATENT[2:], marks=pytest.mark.slow)], ids=["marginal and posterior", "rest"]
)
def test_latent_positions_are_recorded(cases: list[str], library: Path) -> None:
    for result in results(library, *(f"{case} precision=bf16" for case in cases)):
        assert result["recorded transfers"] == []
        assert_waits_only_where_it_must(result)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("names", [list(KERNELS)[:10], list(KERNELS)[10:]], ids=["first", "rest"])
def test_every_preset_stays_on_the_device_in_other_precisions(names: list[str], precision: str, library: Path) -> None:
    for result in results(library, *(f"attention={name} precision={precision}" for name in names)):
        assert_waits_only_where_it_must(result)


@pytest.mark.parametrize(
    ("fault", "reported"), [("item", "model/readout.py"), ("device", "convert all Tensors to FakeTensors")]
)
def test_a_planted_fault_is_found(fault: str, reported: str, library: Path) -> None:
    done = run(library, f"plant={fault}", "attention=luong_dot precision=fp32")
    if fault == "item":
        assert any("_local_scalar_dense" in wait for wait in json.loads(done.stdout)["update waits"])
        assert any("_local_scalar_dense" in wait for wait in json.loads(done.stdout)["recorded transfers"])
        with pytest.raises(AssertionError):
            assert_waits_only_where_it_must(json.loads(done.stdout))
    else:
        assert done.returncode == 1
        assert reported in done.stderr
