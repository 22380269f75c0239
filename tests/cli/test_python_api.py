"""Training, evaluation and comparison from Python give the results of the commands."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import TINY
from hydra.core.global_hydra import GlobalHydra

import nmt
from nmt.config.errors import UserError

QUICK = [*TINY, "training.max_steps=4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> nmt.Run:
    return nmt.train(*QUICK, data="demo", directory=tmp_path_factory.mktemp("python") / "run")


def test_a_run_has_its_scores_its_history_and_its_model(run: nmt.Run) -> None:
    results = json.loads((run.path / "results.json").read_text())
    assert run.scores["test"] == results["test"]
    assert {"train/loss", "validation/loss"} <= {key for line in run.history for key in line}
    (translation,) = run.translator().translate(["the dog"])
    assert translation.tokens[-1] == "</s>"
    assert json.loads((run.path / "manifest.json").read_text())["starts"][0]["overrides"][0] == "data=demo"
    assert "<table>" in run._repr_html_()


def test_an_evaluation_equals_that_of_training(run: nmt.Run) -> None:
    before = run.scores["validation"]
    after = run.evaluate("split=validation")
    assert {key: after[key] for key in ("bleu", "chrf", "ter")} == {key: before[key] for key in ("bleu", "chrf", "ter")}
    assert run.evaluate("split=validation", "search=greedy")["signatures"] == before["signatures"]
    run.evaluate("split=validation", "precision=bf16")  # trained in fp32
    assert "validation.precision-bf16" in run.scores


def test_an_evaluation_with_many_settings_is_saved(run: nmt.Run) -> None:
    given = {"beam_size": 3, "alpha": 0.123456, "max_length": 77, "min_length": 2, "max_ratio": 1.9876}
    given = {f"search.{key}": value for key, value in given.items()}
    given |= {"search.length_penalty": "gnmt", "search.coverage_penalty": 0.0123456, "search.batch_tokens": 999}
    given |= {"tokenize": "char", "lowercase": "true", "checkpoint": "last", "seed": 123456789}
    scores = run.evaluate("split=validation", *(f"{key}={value}" for key, value in given.items()))
    (name,) = (name for name in run.scores if name.startswith("validation.checkpoint-last_seed-123456789_"))
    assert len(name) < 170
    assert run.scores[name]["bleu"] == scores["bleu"]
    run.evaluate("split=validation", *(f"{key}={value}" for key, value in given.items()), "search.min_length=3")
    assert len([name for name in run.scores if name.startswith("validation.checkpoint-last_")]) == 2


def test_a_finished_run_is_not_evaluated_again_but_goes_on_with_more_updates(run: nmt.Run) -> None:
    before = (run.path / "results.json").stat().st_mtime_ns
    assert nmt.train(f"run={run.path}").path == run.path
    assert (run.path / "results.json").stat().st_mtime_ns == before
    longer = nmt.train(f"run={run.path}", "training.max_steps=6")
    assert longer.path == run.path
    assert longer.history[-1]["step"] == 6


@pytest.mark.slow
def test_a_thread_of_a_program_can_train(tmp_path: Path) -> None:
    def work() -> tuple[nmt.Run, int]:
        torch.set_num_threads(1)
        run = nmt.train(*QUICK, "threads=2", directory=tmp_path / "run")
        return run, torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        trained, threads = pool.submit(work).result()
    assert trained.scores["test"]["sentences"] > 0
    assert threads == 1  # as before


def test_runs_are_compared(run: nmt.Run, tmp_path: Path) -> None:
    other = nmt.train(*QUICK, "attention=none", data="demo", directory=tmp_path / "other")
    comparison = nmt.compare_runs([run, other.path], f"baseline={other.path}", output=tmp_path / "comparison")
    assert comparison.page.is_file()
    (group,) = comparison.values["comparisons"]
    # Another test may have trained `run` longer, which its name would say.
    assert {system["name"].split()[0] for system in group["systems"]} == {"bahdanau", "none"}
    assert all(system["name"] in str(comparison) for system in group["systems"])
    alone = nmt.compare_runs(run.path, output=tmp_path / "of-path")
    assert [row["run"] for row in alone.values["comparisons"][0]["runs"]] == [os.path.relpath(run.path)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention=luongdot"], "luong_dot"),
        (["processes=2"], "several processes are for nmt-train"),
    ],
)
def test_mistakes_are_those_of_the_command(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        nmt.train(*overrides, directory=tmp_path / "run")
    assert not GlobalHydra.instance().is_initialized()
    assert not (tmp_path / "run").exists()


def test_what_only_commands_can_do_is_refused(run: nmt.Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="=: only nmt-evaluate takes this key"):
        run.evaluate("output=2")
    with pytest.raises(UserError, match=r"data\.train: .*nowhere"):  # files need no choice of data
        nmt.train(data={"train": tmp_path / "nowhere", "validation": tmp_path / "nowhere"}, directory=tmp_path / "run")
