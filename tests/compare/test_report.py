"""The report: which runs are compared with each other, and the files that are written."""

import csv
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from forks import call
from made_runs import REFERENCES, make_run, worsened, write

from nmt.compare.jobs import mark_sweep
from nmt.compare.report import compare_runs, gather, tables, write_comparison
from nmt.config.errors import UserError
from nmt.system.text_table import markdown, terminal

QUICK: dict[str, Any] = {"bootstrap_samples": 100, "randomisation_trials": 100, "examples": 4, "sentences": []}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_a_folder_holds_unfinished_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    make_run(Path("sweep/a"), REFERENCES)
    (make_run(Path("sweep/b"), REFERENCES) / "hypotheses" / "test.txt").unlink()
    Path("sweep/c").mkdir()
    Path("sweep/c/error.txt").write_text("no room\nseed=2\n\nTraceback")
    with caplog.at_level(logging.WARNING):
        entries, _ = gather(["sweep"], [], "test")
    assert [entry.name for entry in entries] == ["sweep/a"]
    assert "left out: sweep/b: has no test results" in caplog.text
    assert "left out: sweep/c: failed (no room)" in caplog.text
    with pytest.raises(UserError, match="sweep/b: has no test results"):
        gather(["sweep/a", "sweep/b"], [], "test")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", '{"validation/bleu": 3}'),
        ("results.json", '{"test": 3}'),
        ("manifest.json", '{"training": {"seconds": -60.0}}'),
    ],
)
def test_a_damaged_file_costs_no_more_than_its_run(file: str, content: str, caplog: pytest.LogCaptureFixture) -> None:
    make_run(Path("sweep/a"), REFERENCES)
    (make_run(Path("sweep/b"), REFERENCES, "attention=none") / file).write_text(content)
    entries, _ = gather(["sweep"], [], "test")
    assert [entry.name for entry in entries] == ["sweep/a"]
    assert "left out: sweep/b: a file of this run is damaged" in caplog.text
    with pytest.raises(UserError, match="sweep/b: a file of this run is damaged"):
        gather(["sweep/a", "sweep/b"], [], "test")


ESCAPE = "\x1b[31m"


@pytest.mark.slow
def test_no_name_or_error_of_a_run_controls_the_terminal() -> None:
    make_run(Path("sweep/a"), worsened(2))
    manifest = make_run(Path("sweep/b"), REFERENCES, "encoder.layers=2") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"bahdanau"', '"\\u001b[31mnone"'))
    make_run(Path(f"sweep/{ESCAPE}"), worsened(4), "decoder.dropout=0.3")
    (make_run(Path(f"sweep/{ESCAPE}unfinished"), REFERENCES) / "results.json").unlink()
    Path(f"sweep/{ESCAPE}failed").mkdir()
    Path(f"sweep/{ESCAPE}failed/error.txt").write_text(f"{ESCAPE}\n")
    given = ["runs=sweep", "output=out", "markdown=true", "bootstrap_samples=100", "randomisation_trials=100"]
    done = call("nmt-compare", *given, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr.decode()
    printed = (done.stdout + done.stderr).decode()
    assert ("\x1b" in printed, printed.count("left out: ")) == (False, 2)
    assert rb"\\x1b\[31m" in done.stdout  # Markdown escapes the backslash and the bracket
    assert b"\\x1b[31m" in done.stderr
    for path in (path for path in Path("out").iterdir() if path.suffix != ".png"):
        assert b"\x1b" not in path.read_bytes()


def test_what_does_not_compare_is_refused() -> None:
    make_run(Path("a"), REFERENCES)
    make_run(Path("c"), REFERENCES, "evaluation.lowercase=true")
    write(make_run(Path("d"), REFERENCES) / "data" / "test.target", [f"{line} !" for line in REFERENCES])
    write(Path("x"), REFERENCES)
    for runs, systems, message in (
        ("ac", [], "c and a cannot be compared: scores are computed differently"),
        ("ad", [], "a cannot be compared: the held-out sets differ: line 1 of the references"),
        ("a", ["a=x"], "systems: a is a run's name"),
    ):
        with pytest.raises(UserError, match=message):
            gather([*runs], systems, "test")


def test_all_files_say_the_same() -> None:
    make_run(Path("a"), worsened(8), "attention=luong_dot")
    make_run(Path("b"), worsened(2), "attention=none", "seed=3")
    write(Path("x"), worsened(4))
    printed = write_comparison(["a", "b"], Path("out"), systems=["peer=x"], baseline="none", **QUICK)
    tables = ["comparison.csv", "comparison.json", "comparison.md", "differences.csv", "index.html", "systems.csv"]
    pictures = [f"{name}.{kind}" for name in ("cost", "curves", "differences") for kind in ("png", "svg")]
    assert {path.name for path in Path("out").iterdir()} == {*tables, *pictures}
    (found,) = json.loads(Path("out/comparison.json").read_text())["comparisons"]
    systems = found["systems"]
    assert [row["name"] for row in systems] == ["luong_dot", "peer", "none"]
    with Path("out/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    named = [(row["system"], row["run"], row["seed"]) for row in rows]
    assert named == [("luong_dot", "a", "1"), ("peer", "peer", ""), ("none", "b", "3")]
    markdown, page = Path("out/comparison.md").read_text(), Path("out/index.html").read_text()
    for row, run in zip(systems, rows, strict=True):
        assert f"| {run['run']}" in markdown
        assert all(f"{row['bleu']:.2f}" in text for text in (printed, markdown, page))
        assert float(run["bleu"]) == row["bleu"]
        if row["p"] is not None:
            assert f"{row['p']:.4f}{'*' if row['p'] < 0.05 else ''}" in printed
            for text in (printed, markdown):
                assert f"{row['difference']:+.2f} ± {row['difference_ci']:.2f}" in text
            assert all(f"{row[key]:.2f}" in page for key in ("difference", "detectable"))
    assert "other seeds may differ more" in printed  # each system has one seed
    with Path("out/systems.csv").open() as file:
        by_system = list(csv.DictReader(file))
    assert [(row["name"], float(row["bleu"]), row["seeds"]) for row in by_system] == [
        (row["name"], row["bleu"], " ".join(map(str, row["seeds"]))) for row in systems
    ]
    assert not {"curve", "by_length"} & by_system[0].keys()
    with Path("out/differences.csv").open() as file:
        differences = list(csv.DictReader(file))
    assert [float(row["p"]) for row in differences] == [row["p"] for row in found["differences"]]


def test_what_all_pairs_show_is_in_every_file() -> None:
    for name, steps in {"luong_dot": (20, 25), "bahdanau": (18, 26), "none": (2, 2)}.items():
        for seed, step in enumerate(steps, 1):
            make_run(Path(f"{name}{seed}"), worsened(step), f"attention={name}", f"seed={seed}")
    printed = write_comparison(["*[12]"], Path("out"), baseline="all", **QUICK)
    (found,) = json.loads(Path("out/comparison.json").read_text())["comparisons"]
    assert (found["baseline"], len(found["differences"])) == (None, 3)
    assert "other seeds may differ more" not in printed
    for row in found["differences"]:
        assert f"| {row['difference']:+.2f} ± {row['difference_ci']:.2f}" in Path("out/comparison.md").read_text()
    with Path("out/systems.csv").open() as file:
        assert [row["letters"] for row in csv.DictReader(file)] == ["a", "a", "b"]


def test_a_sweep_that_is_not_finished_says_how_many_runs_are_missing() -> None:
    for seed in (1, 2):
        make_run(Path(f"sweep/{seed}"), worsened(8 + seed), f"seed={seed}")
    mark_sweep(Path("sweep"), 5)
    mark_sweep(Path("sweep"), 3)  # the sweep was continued with fewer values
    said = "sweep: unfinished: 3 of 5 runs are missing."
    assert said in write_comparison(["sweep"], Path("out"), **QUICK).splitlines()
    assert said in Path("out/index.html").read_text()
    for names in (["sweep/*"], ["."], ["*/1", "sweep/[2]"]):
        assert compare_runs(names, **QUICK)["missing"] == [said]
    assert compare_runs(["sweep/1", "sweep/2"], **QUICK)["missing"] == []
    Path("sweep/.nmt-sweep").write_bytes(b"")  # as a sweep by Optuna leaves it
    assert compare_runs(["sweep"], **QUICK)["missing"] == []


def test_a_run_that_was_trained_longer_is_named_by_its_last_length() -> None:
    make_run(Path("a"), worsened(8), "training.max_epochs=2")
    make_run(Path("b"), worsened(2), "training.max_epochs=4")
    manifest = json.loads(Path("a/manifest.json").read_text())
    manifest["starts"].append({"overrides": ["run=a", "training.max_epochs=10", "threads=1"]})
    Path("a/manifest.json").write_text(json.dumps(manifest))
    found = compare_runs(["a", "b"], **QUICK)
    assert [row["name"] for row in found["systems"]] == ["max_epochs=10", "max_epochs=4"]


def test_names_are_no_markup_in_markdown() -> None:
    make_run(Path("<b>x"), worsened(8), "attention=none")
    write(Path("y"), worsened(4))
    write_comparison(["<b>x"], Path("out"), systems=["<i>*a* [l](u) &amp;=y"], baseline="<i>*a* [l](u) &amp;", **QUICK)
    text = Path("out/comparison.md").read_text()
    assert not re.search(r"(?<!\\)(<[bi]>|\*a\*|\[l|&amp;)", text)
    assert "\\<i>\\*a* \\[l\\](u) \\&amp;" in text


def test_a_column_that_nothing_fills_is_left_out_and_the_metric_that_ranks_has_one() -> None:
    make_run(Path("a"), worsened(8), "attention=none", gold=False)
    comparison = compare_runs(["a"], metric="ter", **QUICK)
    head, _, values = tables(comparison, terminal).splitlines()[2:5]
    assert ["AER" in head, "difference" in head, "ms/update" in head] == [False, False, True]
    best = comparison["systems"][0]
    assert f"{best['ter']:.2f} ± {best['ter_ci']:.2f}" in values
    assert tables(comparison, markdown).splitlines()[2].startswith("|")


def test_a_baseline_is_named_by_system_or_by_run() -> None:
    make_run(Path("a"), worsened(8), "attention=none")
    make_run(Path("b"), worsened(2))
    for name in ("bahdanau", "b", "b/", str(Path("b").resolve())):
        assert compare_runs(["a", "b"], baseline=name, **QUICK)["baseline"] == "bahdanau"
    with pytest.raises(UserError, match=r"baseline=bahdanaw: not one of none, bahdanau; did you mean 'bahdanau'\?"):
        compare_runs(["a", "b"], baseline="bahdanaw", **QUICK)
