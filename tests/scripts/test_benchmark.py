"""The scripts that measure speed run, and their figures are consistent."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, script
from forks import ended, forked

SCALING = script("scaling")
SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"


def measured(folder: Path, *words: str) -> str:
    """Run the benchmark in a fork and return its output."""
    benchmarks = script("benchmark")

    def work() -> int:
        os.chdir(folder)
        sys.argv = [str(SCRIPT), *words]
        benchmarks.main()
        return 0

    output = folder / "output.txt"
    assert ended(forked(work, output)) == 0, output.read_text()
    return output.read_text()


@pytest.mark.slow
def test_measures_training_decoding_presets_and_growth(tmp_path: Path) -> None:
    printed = measured(tmp_path, "--updates", "2", "--operations", "--presets", "--growth", *TINY, "decoder.hidden=24")
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
    assert all(row["sentences_per_second"] > 0 for row in found["presets"])
    assert [row["length"] for row in found["growth"]][:4] == [10, 20, 40, 80]
    assert "luong_dot: left out: attention.score.kind=dot" in printed
    assert "luong_dot" not in {row["attention"] for row in found["presets"]}
    for rows in (found["decoding"], found["presets"], found["growth"]):
        assert all(row["tokens_per_second"] > 0 for row in rows)
    kinds = [row["kind"] for row in found["operations"]]
    assert (kinds[0], kinds[-1]) == ("matrix products", "Python and autograd")
    assert sum(row["share"] for row in found["operations"]) == pytest.approx(1)
    for heading in (*kinds, "target tokens/s", "ms an update", "sentences/s", "`attention=`", "vocabulary"):
        assert heading in printed


@pytest.mark.slow
def test_words_are_timed_beside_yoyodyne(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interpreter stands for one that has yoyodyne, and prints what the script expects of it."""
    table, interpreter = tmp_path / "words.tsv", tmp_path / "python"
    table.write_text("".join(f"{word}\t{' '.join(word)}\n" for word in ("abba", "baa", "ab") for _ in range(30)))
    interpreter.write_text("""#!/bin/sh\necho noise; echo '{"parameters": 1934, "tokens_per_second": 0.5}'\n""")
    interpreter.chmod(0o755)
    small = ("--rounds", "1", "--updates", "10", "--threads", "1")
    monkeypatch.setattr(
        sys, "argv", ["bench_words.py", *map(str, (table, table)), "--yoyodyne", str(interpreter), *small]
    )
    script("bench_words").main()
    _, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["yoyodyne", "1,934", "0", "1.00"]
    assert [row[0] for row in rows[1:]] == ["nmt, same sizes", "nmt, experiment=g2p"]
    for _, _, speed, ratio in rows[1:]:
        assert float(ratio) == pytest.approx(float(speed.replace(",", "")) / 0.5, abs=1.01)


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
    assert views.calls == 3  # a column, an expansion and an empty tensor
    assert views.moved == 0
    assert all(cost.seconds > 0 for cost in (products, pointwise, copies, views))


def test_a_line_has_no_negative_start() -> None:
    assert SCALING.line_through([1.0, 2.0, 4.0], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0))
    assert SCALING.line_through([1.0, 2.0], [1.0, 3.0]) == pytest.approx((0.0, 4 / 3))


def test_a_reduction_is_a_ring_within_and_a_ring_between_machines() -> None:
    one = SCALING.Network("one", 4, 1, within=100.0, between=1.0, latency=0.5)
    assert one.seconds(200.0) == pytest.approx(2 * 3 / 4 * 200 / 100 + 6 * 0.5)
    two = one._replace(machines=2, between=10.0)
    assert two.seconds(200.0) == pytest.approx(one.seconds(200.0) + 2 * 1 / 2 * 200 / 10 + 2 * 0.5)
    assert SCALING.Network("alone", 1, 1, 1.0, 1.0, 1.0).seconds(200.0) == 0
