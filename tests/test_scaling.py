"""The script that measures and predicts how training scales."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import TINY

SCRIPT = Path(__file__).parents[1] / "scripts" / "scaling.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_has_no_negative_start(script: ModuleType) -> None:
    assert script.line_through([1.0, 2.0, 4.0], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0))
    assert script.line_through([1.0, 2.0], [1.0, 3.0]) == pytest.approx((0.0, 4 / 3))


def test_a_reduction_is_a_ring_within_and_a_ring_between_machines(script: ModuleType) -> None:
    one = script.Network("one", 4, 1, within=100.0, between=1.0, latency=0.5)
    assert one.seconds(200.0) == pytest.approx(2 * 3 / 4 * 200 / 100 + 6 * 0.5)
    two = one._replace(machines=2, between=10.0)
    assert two.seconds(200.0) == pytest.approx(one.seconds(200.0) + 2 * 1 / 2 * 200 / 10 + 2 * 0.5)
    assert script.Network("alone", 1, 1, 1.0, 1.0, 1.0).seconds(200.0) == 0


def test_the_batch_that_is_named_keeps_the_efficiency(script: ModuleType) -> None:
    measured = {
        "parameters": 10_000_000,
        "target_tokens": {512: 400.0, 1024: 800.0},
        "alone": {512: 0.05, 1024: 0.09},
    }
    for row in script.predictions(measured, [100.0]):
        for name in ("fp32", "bf16"):
            compute = (0.01 + 0.0001 * row[f"tokens_{name}"]) / 100
            assert compute / (compute + row[f"reduce_{name}"] / 1000) == pytest.approx(script.KEPT)
        assert row["reduce_bf16"] < row["reduce_fp32"]


@pytest.mark.slow
def test_it_measures_and_predicts(tmp_path: Path) -> None:
    options = ["--processes", "2", "--tokens", "128,256", "--rounds", "1", "--device-speed", "10"]
    words = [*options, *TINY, "precision=fp32"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(Path(tmp_path, done.stdout.splitlines()[-1]).read_text())
    (row,) = results["local"]
    assert row["processes"] == 2
    assert row["gain"] == pytest.approx(row["together"] / row["alone"])
    assert 0 < row["predicted"] < 4
    assert len(results["predictions"]) == 5
    assert "64 x 8 GPUs, 100 Gb/s" in done.stdout
