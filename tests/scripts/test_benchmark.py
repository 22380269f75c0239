"""The scripts that measure speed: they run, and their figures fit together."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import TINY, script
from forks import ended, forked

SCALING = script("scaling")
SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"


def measured(folder: Path, *words: str) -> str:
    """What it prints, in a fork of this process and with a small product to compare with."""
    benchmarks = script("benchmark")

    def work() -> int:
        os.chdir(folder)
        sys.argv = [str(SCRIPT), *words]
        benchmarks.SIDE = 128
        benchmarks.main()
        return 0

    output = folder / "output.txt"
    assert ended(forked(work, output)) == 0, output.read_text()
    return output.read_text()


@pytest.mark.slow
def test_measures_training_decoding_presets_and_growth(tmp_path: Path, tiny_overrides: list[str]) -> None:
    printed = measured(tmp_path, "--updates", "2", "--presets", "--growth", *tiny_overrides, "decoder.hidden=24")
    (path,) = tmp_path.rglob("benchmark.json")
    assert "benchmark/" in str(path)
    assert str(path.relative_to(tmp_path)) in printed
    found = json.loads(path.read_text())
    training = found["training"]
    assert training["share_of_product"] == pytest.approx(
        training["tokens_per_second"] * training["mflop_per_token"] / training["product_gflops"] / 1000
    )
    assert 0 <= training["padding"] < 0.5
    assert sum(found["phases"].values()) > 0
    assert [row["search"] for row in found["decoding"]] == ["greedy", "beam 2"]
    assert {"none", "bahdanau", "monotonic"} < {row["attention"] for row in found["presets"]}
    assert [row["length"] for row in found["growth"]][:4] == [10, 20, 40, 80]
    assert "luong_dot: left out: attention.score.kind=dot" in printed
    assert "luong_dot" not in {row["attention"] for row in found["presets"]}
    for rows in (found["decoding"], found["presets"], found["growth"]):
        assert all(row["tokens_per_second"] > 0 for row in rows)
    for heading in ("target tokens/s", "ms an update", "sentences/s", "`attention=`", "vocabulary"):
        assert heading in printed


@pytest.mark.slow
def test_a_model_of_several_readouts_has_no_phases(tmp_path: Path, tiny_overrides: list[str]) -> None:
    measured(tmp_path, "--updates", "2", "--no-decoding", *tiny_overrides, "attention=marginal")
    (path,) = tmp_path.rglob("benchmark.json")
    found = json.loads(path.read_text())
    assert found["phases"] == {}
    assert found["training"]["share_of_product"] is None
    assert found["training"]["tokens_per_second"] > 0


def test_a_corpus_without_a_test_set_is_measured_on_its_validation_set(
    tmp_path: Path, tiny_overrides: list[str]
) -> None:
    for name in ("train", "valid"):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text("a b c d e\nb c d a\nc a e\n" * 30, encoding="utf-8")
    kept = [word for word in tiny_overrides if not word.startswith("data")]
    corpus = ["data=files", "data.source_lang=en", "data.target_lang=de", "data.train=train", "data.validation=valid"]
    printed = measured(tmp_path, "--operations", "--updates", "1", *kept, *corpus, "size=small", "tokenizer=word")
    (path,) = tmp_path.rglob("benchmark.json")
    found = json.loads(path.read_text())
    assert all(row["sentences_per_second"] > 0 for row in found["decoding"])
    kinds = [row["kind"] for row in found["operations"]]
    assert kinds[0] == "matrix products"
    assert kinds[-1] == "Python and autograd"
    assert all(kind in printed for kind in kinds)
    assert sum(row["share"] for row in found["operations"]) == pytest.approx(1)


def test_operations_are_counted_by_kind() -> None:
    operations = script("operations")
    a, b, c, row = torch.zeros(3, 4), torch.zeros(4, 5), torch.zeros(3, 5), torch.zeros(1, 5)
    batches = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)
    with operations.Operations() as found:
        torch.addmm(c, a, b)
        torch.bmm(*batches)
        torch.mv(a, b[:, 0])
        torch.mm(a, b)
        row.expand(100, 5).exp()
        torch.cat([a, a])
        torch.empty(7)
    products, pointwise, copies, optimizer, views = (found.costs[kind] for kind in operations.KINDS)
    assert (products.calls, products.flops) == (4, 2 * (60 + 120 + 12 + 60))
    assert (pointwise.calls, pointwise.moved) == (1, 4 * (5 + 500))
    assert (copies.calls, copies.moved) == (1, 4 * (12 + 12 + 24))
    assert optimizer == operations.Cost()
    assert views.calls == 3  # a column, an expansion, an empty tensor
    assert views.moved == 0
    assert all(cost.seconds > 0 for cost in (products, pointwise, copies, views))


def test_the_optimizer_is_a_kind_of_its_own_and_bounds_come_from_the_machine() -> None:
    operations = script("operations")
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.Adam([weight], fused=True)

    def update(step: int) -> None:
        (weight * weight).sum().backward()
        weight.grad = torch.mm(torch.zeros(100, 50), torch.full((50, 1), float(step)))[:, 0]
        optimizer.step()

    with patch.object(operations, "bandwidth", lambda: 4e3):
        rows = {row["kind"]: row for row in operations.operations(update, 3, lambda: 1e4)}
    assert rows["optimizer"]["calls"] >= 1
    assert rows["matrix products"]["milliseconds_at_bound"] == pytest.approx(1000 * 2 * 5000 / 1e4)
    # Adam reads and writes at least the weights, their gradient and two moments.
    assert rows["optimizer"]["milliseconds_at_bound"] >= 4 * 400 / 4


@pytest.mark.slow
def test_beside_busy_processes(tmp_path: Path, tiny_overrides: list[str]) -> None:
    printed = measured(tmp_path, "--updates", "2", "--busy", "1", "--no-decoding", *tiny_overrides)
    (path,) = tmp_path.rglob("benchmark.json")
    busy = json.loads(path.read_text())["busy"]
    assert busy["processes"] == 1
    assert 0 < busy["processor_share"] <= 1.05
    assert busy["share_of_fair"] == pytest.approx(busy["beside"] / busy["alone"] / busy["processor_share"])
    assert "beside them" in printed


def test_a_line_has_no_negative_start() -> None:
    assert SCALING.line_through([1.0, 2.0, 4.0], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0))
    assert SCALING.line_through([1.0, 2.0], [1.0, 3.0]) == pytest.approx((0.0, 4 / 3))


def test_a_reduction_is_a_ring_within_and_a_ring_between_machines() -> None:
    one = SCALING.Network("one", 4, 1, within=100.0, between=1.0, latency=0.5)
    assert one.seconds(200.0) == pytest.approx(2 * 3 / 4 * 200 / 100 + 6 * 0.5)
    two = one._replace(machines=2, between=10.0)
    assert two.seconds(200.0) == pytest.approx(one.seconds(200.0) + 2 * 1 / 2 * 200 / 10 + 2 * 0.5)
    assert SCALING.Network("alone", 1, 1, 1.0, 1.0, 1.0).seconds(200.0) == 0


def test_the_batch_that_is_named_keeps_the_efficiency() -> None:
    measured = {
        "parameters": 10_000_000,
        "target_tokens": {512: 400.0, 1024: 800.0},
        "alone": {512: 0.05, 1024: 0.09},
    }
    for row in SCALING.predictions(measured, [100.0]):
        for name in ("fp32", "bf16"):
            compute = (0.01 + 0.0001 * row[f"tokens_{name}"]) / 100
            assert compute / (compute + row[f"reduce_{name}"] / 1000) == pytest.approx(SCALING.KEPT)
        assert row["reduce_bf16"] < row["reduce_fp32"]


@pytest.mark.slow
def test_it_measures_and_predicts(tmp_path: Path) -> None:
    options = ["--processes", "2", "--tokens", "128,256", "--rounds", "1", "--device-speed", "10"]
    words = [*options, *TINY, "precision=fp32"]
    done = subprocess.run(
        [sys.executable, SCALING.__file__, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(Path(tmp_path, done.stdout.splitlines()[-1]).read_text())
    (row,) = results["local"]
    assert row["processes"] == 2
    assert row["gain"] == pytest.approx(row["together"] / row["alone"])
    assert 0 < row["predicted"] < 4
    assert len(results["predictions"]) == 5
    assert "64 x 8 GPUs, 100 Gb/s" in done.stdout
