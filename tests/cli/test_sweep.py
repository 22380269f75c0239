"""Sweeps as a user runs them: names of jobs, failures, the table of results, and continuation after a kill."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import TINY
from forks import call_text, ended, forked
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from nmt.cli import train
from nmt.cli.compose import composed
from nmt.cli.sweep import _set_up
from nmt.compare.entry import planned_jobs
from nmt.compare.jobs import job_name
from nmt.config.checks import config_dir
from nmt.config.errors import UserError
from nmt.system.files import read_lines

NMT_TRAIN = Path(sys.executable).parent / "nmt-train"
SHORT = [*(value for value in TINY if not value.startswith(("threads=", "training.max_epochs=")))]
SHORT += ["training.max_epochs=2", "training.max_steps=8"]
SHORT += ["validation.unit=steps", "validation.every=4"]


def sweep(folder: Path, *overrides: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = call_text("nmt-train", "-m", *SHORT, "hydra.sweep.dir=sweep", *overrides, cwd=folder)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def begun(folder: Path, until: str, *overrides: str) -> int:
    """Start a sweep in another process, and wait until it has written a file. Returns the process id."""

    def work() -> int:
        os.chdir(folder)
        sys.argv = ["nmt-train", "-m", *SHORT, "hydra.sweep.dir=sweep", *overrides]
        train.main()
        return 0

    process = forked(work, folder / "output")
    while not (folder / "sweep" / until).exists():
        assert os.waitpid(process, os.WNOHANG) == (0, 0), (folder / "output").read_text()
        time.sleep(0.02)
    return process


def table(folder: Path) -> list[dict[str, Any]]:
    """Read the table of jobs without measured times."""
    rows: list[dict[str, Any]] = json.loads((folder / "sweep" / "jobs.json").read_text())["jobs"]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def compared(folder: Path) -> list[tuple[Any, ...]]:
    text = (folder / "sweep" / "comparison" / "comparison.json").read_text()
    (found,) = json.loads(text)["comparisons"]
    return [tuple(row[key] for key in ("run", "bleu", "chrf", "ter", "p_bootstrap")) for row in found["runs"]]


def test_a_job_is_named_by_what_varies() -> None:
    overrides = ["attention=bahdanau", "++optimizer.lr=0.003", "seed=2", "threads=1"]
    assert job_name(overrides, "attention", "optimizer.lr") == "attention-bahdanau_lr-0.003"
    assert job_name(["encoder.hidden=8", "decoder.hidden=16"], "encoder.hidden", "decoder.hidden") == (
        "encoder.hidden-8_decoder.hidden-16"
    )


def test_names_that_cannot_tell_all_differ_by_a_hash() -> None:
    def name(value: str) -> str:
        return job_name([f"data.path={value}"], "data.path")

    values = ["/a/b", "/a-b", "a b", "ä", "ö", "x" * 400, "x" * 401, f"/one/{'y' * 60}", f"/two/{'y' * 60}"]
    names = [name(value) for value in values]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{6,60}", each) for each in names)
    many = {f"section{n}.key{n}": "z" * 30 for n in range(20)}
    assert len(job_name([f"{key}={value}" for key, value in many.items()], *many)) <= 200


# One of the four jobs is refused: luong_dot needs decoder states as wide as encoder states.
GRID = ["attention=none,luong_dot", "decoder.hidden=32,48", "validation.every=2", "training.max_steps=2"]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run a sweep whose jobs run one after the other."""
    folder = tmp_path_factory.mktemp("grid")
    return folder, sweep(folder, *GRID, "threads=1", status=2)


@pytest.mark.system
def test_failed_jobs_are_recorded_and_the_others_go_on_and_are_compared(
    grid: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = grid
    assert [(row["job"], row["status"]) for row in table(folder)] == [
        ("attention-luong_dot_hidden-32", "finished"),
        ("attention-luong_dot_hidden-48", "failed"),
        ("attention-none_hidden-32", "finished"),
        ("attention-none_hidden-48", "finished"),
    ]
    (error,) = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert "attention-luong_dot_hidden-48: attention.score.kind=dot needs states" in error
    recorded = (folder / "sweep" / "attention-luong_dot_hidden-48" / "error.txt").read_text()
    assert recorded.startswith("attention.score.kind=dot needs")
    assert "Traceback (most recent call last)" in recorded
    assert table(folder)[0]["values"] == "attention=luong_dot decoder.hidden=32"
    assert len(compared(folder)) == 3
    assert planned_jobs(folder / "sweep") == 4
    assert "job 4 of 4" in done.stderr
    *_, page, board, last = done.stdout.splitlines()
    assert (page, last) == ("page: sweep/comparison/index.html", "sweep: sweep")
    assert board == "tensorboard: tensorboard --logdir sweep --host localhost"
    for row in table(folder):
        shown = next(line for line in done.stdout.splitlines() if line.startswith(row["job"]))
        assert row["status"] in shown
        assert row["directory"] in shown


@pytest.mark.slow
@pytest.mark.system
def test_a_killed_sweep_ends_like_one_that_was_not_and_can_grow(tmp_path: Path) -> None:
    given = ["attention=none", "threads=1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    sweep(whole, *given, "seed=1,2,3")
    process = begun(killed, "seed-2/checkpoints/last.pt", *given, "seed=1,2,3")
    os.kill(process, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    first = killed / "sweep" / "seed-1" / "checkpoints" / "last.pt"
    before = first.stat()
    done = sweep(killed, *given, "seed=1,2,3")
    assert done.stderr.count("already finished: skipped") == 1
    assert first.stat() == before
    assert re.search(r"resumed at step [48] of 8", done.stderr)
    assert table(killed) == table(whole)
    assert compared(killed) == compared(whole)
    assert not list(killed.rglob("error.txt"))

    more = sweep(killed, *given, "seed=2,4")
    assert more.stderr.count("already finished: skipped") == 1
    assert [row["job"] for row in table(killed)] == ["seed-1", "seed-2", "seed-3", "seed-4"]
    longer = sweep(killed, *given, "seed=1", "training.max_steps=12", "hydra.sweep.subdir=seed-1")
    assert "resumed at step 8 of 12" in longer.stderr
    other = sweep(killed, *given, "seed=1,2", "decoder.dropout=0.5", status=2)
    assert other.stderr.count("holds a run of another configuration (decoder.dropout is 0.1 there, 0.5 here)") >= 2
    assert {row["status"] for row in table(killed)} == {"finished"}
    assert [row["job"] for row in table(killed) if row["error"]] == ["seed-1", "seed-2"]
    assert not list(killed.rglob("error.txt"))
    assert len(compared(killed)) == 4


def test_one_possible_job_is_enough(tmp_path: Path) -> None:
    words = ["attention=none,bahdanau", "training.guided_alignment=1", "seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep"]
    given = _set_up(composed("train", [word for word in words if "," not in word]), tmp_path / "sweep", words)
    assert given == [*words[:3], *given[3:]]
    assert (tmp_path / "sweep").is_dir()


def test_a_directory_that_holds_anything_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "multirun.yaml").write_text("hydra: {}\n")
    done = sweep(tmp_path, "seed=1,2", status=2)
    assert done.stderr == "nmt-train: error: sweep: is not empty and not a sweep; choose another hydra.sweep.dir\n"
    assert [file.read_text() for file in (tmp_path / "sweep").iterdir()] == ["hydra: {}\n"]


@pytest.mark.system
def test_a_signal_ends_the_sweep_and_tells_how_to_go_on(tmp_path: Path) -> None:
    given = ["training.max_steps=4000", "training.max_epochs=4000", "seed=1,2", "threads=1"]
    process = begun(tmp_path, "seed-1/checkpoints/last.pt", *given)
    os.kill(process, signal.SIGTERM)
    assert ended(process) == 128 + signal.SIGTERM
    told = (tmp_path / "output").read_text()
    assert "to resume the sweep, run the same command with hydra.sweep.dir=sweep" in told
    assert not (tmp_path / "sweep" / "seed-2").exists()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("launcher", ["parallel", "slurm_local"])
def test_jobs_beside_each_other_give_what_they_give_alone(
    launcher: str, grid: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    pytest.importorskip({"parallel": "joblib", "slurm_local": "submitit"}[launcher])
    alone, _ = grid
    done = sweep(tmp_path, *GRID, f"hydra/launcher={launcher}", status=2)
    assert table(tmp_path) == table(alone)
    assert compared(tmp_path) == compared(alone)
    config = OmegaConf.load(tmp_path / "sweep" / "attention-none_hidden-32" / "config.yaml")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert config.threads == (max(1, cores // 2) if launcher == "parallel" else 1)
    if launcher == "parallel":
        lines = [line for line in done.stderr.splitlines() if "validation at step 2" in line]
        assert len({line.partition("]")[0] for line in lines}) == 3  # each names its job


@pytest.mark.slow
@pytest.mark.system
def test_jobs_of_a_killed_parallel_sweep_do_not_live_on(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    command = [NMT_TRAIN, "-m", *SHORT, "training.max_steps=40000", "training.max_epochs=40000", "seed=1,2"]
    process = subprocess.Popen(
        [*command, "hydra.sweep.dir=sweep", "hydra/launcher=parallel"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    runs = [tmp_path / "sweep" / f"seed-{seed}" for seed in (1, 2)]
    while not all((run / "checkpoints" / "last.pt").exists() for run in runs):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    while not all("stopped by SIGTERM" in (run / "train.log").read_text() for run in runs):
        assert time.monotonic() < until, "a job went on without its sweep"
        time.sleep(0.1)
    pids = [int((run / ".lock").read_text()) for run in runs]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "a worker stayed"
        time.sleep(0.1)


SEARCH = ["hydra/sweeper=optuna", "hydra.sweeper.startup_trials=2", "threads=1", "training.max_steps=12"]
# The loss differs between all trials, so that some trial is pruned.
SEARCH += ["data.train_size=200", "data.max_length=200", "validation.monitor=loss", "decoder.readout=deep"]
SEARCH += ["optimizer.lr=tag(log,interval(0.0001,0.1))", "decoder.layers=range(1,3)", "attention=none,luong_dot"]


@pytest.mark.slow
@pytest.mark.system
def test_optuna_searches_prunes_and_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    sweep(whole, *SEARCH, "hydra.sweeper.n_trials=5")
    process = begun(killed, "1/checkpoints/last.pt", *SEARCH, "hydra.sweeper.n_trials=3")
    os.kill(process, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    done = sweep(killed, *SEARCH, "hydra.sweeper.n_trials=5")
    rows = table(killed)
    assert [row["job"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows == table(whole)
    assert compared(killed) == compared(whole)
    assert {row["status"] for row in rows} == {"finished", "pruned"}
    for row in rows:
        if row["status"] == "pruned":
            assert row["test"] is None
            lines = read_lines(killed / row["directory"] / "metrics.jsonl")
            assert len([line for line in lines if "validation/bleu" in line]) < 3
    assert re.search(r"best trial: \d, validation loss \d\.\d+, with .*optimizer\.lr=", done.stderr)
    title = (killed / "sweep" / "comparison" / "comparison.md").read_text().splitlines()[0]
    assert title.startswith("validation: ")


def searching(folder: Path, scores: list[float], monitor: str = "bleu", n_trials: int = 4) -> Any:  # noqa: ANN401
    """Return a sweeper whose launcher appends to `scores` the score of each job, which is its learning rate."""

    from nmt.cli.optuna_sweeper import OptunaSweeper

    class Launcher:
        def launch(self, jobs: list[list[str]], first: int) -> list[JobReturn]:
            del first
            score = float(jobs[0][0].removeprefix("optimizer.lr="))
            scores.append(score)
            config = OmegaConf.create({"hydra": {"runtime": {"output_dir": str(folder / "no run")}}})
            return [JobReturn(hydra_cfg=config, status=JobStatus.COMPLETED, _return_value=score)]

    settings = {"n_trials": n_trials, "n_jobs": 1, "sampler": "random", "pruner": "none", "startup_trials": 0}
    search = OptunaSweeper(None, **settings)
    search._directory, search._launcher = folder, Launcher()
    search._loader = SimpleNamespace(load_sweep_config=lambda config, overrides: None)
    hydra = {"launcher": {}, "overrides": {"hydra": []}}
    search._config = OmegaConf.create({"seed": 1, "validation": {"monitor": monitor}, "hydra": hydra})
    return search


@pytest.mark.parametrize(("monitor", "best"), [("bleu", max), ("loss", min)])
def test_a_search_keeps_the_best_trial(
    monitor: str, best: Callable[[Iterable[float]], float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("optuna")
    scores: list[float] = []
    with caplog.at_level("INFO"):
        searching(tmp_path, scores, monitor).sweep(["optimizer.lr=interval(0.1,0.9)"])
    kept = best(scores)
    assert len(set(scores)) == 4
    assert f"best trial: {scores.index(kept)}, validation {monitor} {kept:.4f}" in caplog.text


def test_a_search_goes_on_after_half_a_line_and_only_one_process_searches(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    scores: list[float] = []
    searching(tmp_path, scores).sweep(["optimizer.lr=interval(0.1,0.9)"])
    with (tmp_path / "optuna.journal").open("a") as journal:
        journal.write('{"op_code": 6, "wor')
    for trials in (5, 6):  # the line would disturb only the second search that follows it
        searching(tmp_path, scores, n_trials=trials).sweep(["optimizer.lr=interval(0.1,0.9)"])
        assert len(scores) == trials
    with (tmp_path / "optuna.journal").open("a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is searching there"):
            searching(tmp_path, scores, n_trials=7).sweep(["optimizer.lr=interval(0.1,0.9)"])
    assert len(scores) == 6


SEARCHING = ["-m", "hydra/sweeper=optuna"]
# Arguments -> message. The recipe `weighted` is refused without attention.
REFUSED: list[tuple[list[str], str]] = [
    (["-m", "experiment=attention_study,cells"], "experiment: this recipe varies attention, seed; use it for a sweep"),
    (["-m", "++hydra.run.dir=x", "seed=1,2"], "hydra.run.dir=x: sets the directory of a single run; that of a sweep"),
    (["hydra/launcher=parallel"], "hydra/launcher=parallel: is for a sweep; add -m"),
    (["-m", "hydra/launcher=slurm", "hydra.launcher.partitoin=x"], "did you mean 'hydra.launcher.partition'?"),
    (["-m", "optimizer.lr=interval(0.1,0.2)"], "interval(a,b) is for a search: add hydra/sweeper=optuna"),
    (["-m", "attention=none", "experiment=weighted", "seed=1,2"], "guided_alignment=1.0 needs an attention"),
    (SEARCHING, "hydra/sweeper=optuna: nothing to search; give a key several values or an interval(a,b)"),
    ([*SEARCHING, "optimizer.lr=interval(0.001,0.01)", "seed=abc"], "seed=abc: input should be a valid integer"),
    ([*SEARCHING, "seed=1,2", "hydra.sweeper.sampler=tpa"], "sampler=tpa: not one of tpe, random; did you mean 'tpe'?"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[" ".join(given) for given, _ in REFUSED])
def test_what_would_be_ignored_or_fail_in_every_job_is_refused(given: list[str], message: str, tmp_path: Path) -> None:
    if "hydra/sweeper=optuna" in given:
        pytest.importorskip("optuna")
    (tmp_path / "cfg" / "experiment").mkdir(parents=True)
    weighted = "# @package _global_\ntraining: {guided_alignment: 1}\n"
    (tmp_path / "cfg" / "experiment" / "weighted.yaml").write_text(weighted)
    done = call_text("nmt-train", "--config-dir=cfg", *given, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("nmt-train: error: ")
    assert message in line
    assert not [*tmp_path.rglob("config.yaml"), *tmp_path.rglob("optuna.journal")]


PAPERS = [f"papers/{path.stem}" for path in sorted((config_dir() / "experiment" / "papers").glob("*.yaml"))]


@pytest.mark.parametrize("name", ["attention_study", "cells", "learning_rate", *PAPERS])
def test_ready_sweeps_vary_what_exists(name: str) -> None:
    recipe = OmegaConf.load(config_dir() / "experiment" / f"{name}.yaml")
    assert recipe.hydra.mode == "MULTIRUN"
    given = [f"{key}={value}" for key, value in recipe.hydra.sweeper.params.items()]
    jobs = 1
    for override in OverridesParser.create().parse_overrides(given):
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
        jobs *= len(values)
        folder = config_dir() / override.get_key_element()
        if folder.is_dir():
            assert {path.stem for path in folder.glob("[!_]*.yaml")} >= set(values)
    assert jobs >= 6
