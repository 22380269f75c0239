"""Trackers get what TensorBoard gets, hold up nothing, and are left out when they fail."""

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, values_of
from forks import call
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig
from nmt.report.trackers import Experiment, MLflow
from nmt.run import SWEEP, RunDirectory, read_json
from nmt.training import checkpoint, trackers
from nmt.training.job import train
from nmt.training.trackers import Background

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_unevaluated")]
QUICK = ["training.max_steps=2", "validation.unit=steps", "validation.every=1", "training.log_every=1"]
SAMPLES = "validation.samples=1"
LOGGERS = "logger=[tensorboard,wandb]"


class Recorder:
    """A tracker that keeps what it is given; `calls` are those of all of its runs."""

    calls: list[tuple[Any, ...]]
    fails_at = ""

    def __init__(self, experiment: Any, **settings: Any) -> None:  # noqa: ANN401
        self.id = experiment.id or "made-here"
        self.calls.append(("begin", experiment, settings))

    def __getattr__(self, name: str) -> Callable[..., None]:
        def record(*arguments: Any) -> None:  # noqa: ANN401
            self.calls.append((name, *arguments))
            if name == self.fails_at:
                raise ConnectionError("no route to host\ndetails")

        return record


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorder]]:
    """In the place of W&B."""
    kind = type("Fresh", (Recorder,), {"calls": []})
    monkeypatch.setattr(trackers, "Wandb", kind)
    monkeypatch.setattr(trackers, "find_spec", lambda _: True)
    yield kind
    assert not [thread for thread in threading.enumerate() if thread.name in {"wandb", "mlflow", "aim"}]


@pytest.fixture
def _unevaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the final evaluation, which takes most of the time of a short run, by a fixed result."""

    def told(run: RunDirectory, *_: object) -> None:
        run.update_json(run.results, {"test": {"bleu": 1.5}})

    monkeypatch.setattr("nmt.training.job._evaluate", told)


def run_in(folder: Path, *overrides: str, given: list[str] | None = None) -> Path:
    values = values_of("train", [*TINY, *QUICK, *overrides])
    assert train(validated(TrainConfig, values), folder, given or []) == 0
    return folder


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"]
    return {tag: [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)] for tag in tags}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = checkpoint.load(folder / "checkpoints" / "last.pt")["model"]
    return model


def test_a_tracker_gets_what_tensorboard_gets(tmp_path: Path, recorder: type[Recorder]) -> None:
    run = run_in(tmp_path / "run", SAMPLES, LOGGERS, "tracking.wandb_entity=me", given=["optimizer.lr=0.1", LOGGERS])
    plain = run_in(tmp_path / "plain", SAMPLES)
    (_, experiment, settings), *calls, last = recorder.calls
    assert (experiment.project, experiment.name, experiment.group, experiment.id) == (
        "nmt",
        f"{tmp_path.name}/run",
        None,
        None,
    )
    assert experiment.tags == {"optimizer.lr": "0.1"}
    assert experiment.config["encoder"]["hidden"] == 16
    assert settings == {"entity": "me"}
    sent: dict[str, list[tuple[int, Any]]] = {}
    for _, step, values in (each for each in calls if each[0] in {"scalars", "outcome"}):
        for tag, value in values.items():
            sent.setdefault(tag, []).append((step, pytest.approx(value, rel=1e-6)))
    assert curves(run) == sent
    assert "best/test_bleu" in sent
    shown = [each[1:] for each in calls if each[0] == "image"]
    assert [(tag, step, array.shape[2]) for tag, array, step in shown] == [("alignment/1", step, 3) for step in (1, 2)]
    assert [each[1:] for each in calls if each[0] == "samples"][-1][0] == "validation/samples"
    assert last == ("close", True)
    # Nothing else differs, with or without.
    assert {tag: [step for step, _ in points] for tag, points in curves(plain).items()} == {
        tag: [step for step, _ in points] for tag, points in sent.items()
    }
    assert all(tensor.equal(weights(plain)[name]) for name, tensor in weights(run).items())
    assert read_json(run / trackers.IDS) == {"wandb": "made-here"}
    assert not (plain / trackers.IDS).exists()


@pytest.mark.parametrize("method", ["__init__", "scalars", "outcome", "close"])
def test_a_tracker_that_fails_is_left_out_with_one_warning(
    method: str, tmp_path: Path, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SystemExit("no account")

    if method == "__init__":
        monkeypatch.setattr(recorder, "__init__", refuse)
    else:
        monkeypatch.setattr(recorder, "fails_at", method)
    run = run_in(tmp_path / "run", LOGGERS)
    assert json.loads((run / "manifest.json").read_text())["status"] == "finished"
    reason = "no account" if method == "__init__" else "no route to host"
    warnings = [line for line in (run / "train.log").read_text().splitlines() if "logger=" in line]
    assert [line.partition("WARNING ")[2] for line in warnings] in (
        [f"logger=wandb: failed ({reason}); it is left out from here on"],
        [] if method == "close" else None,  # the log file is closed first
    )
    assert method == "__init__" or recorder.calls[-1][0] == method


def test_one_that_is_too_slow_or_hangs_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "MAX_WAITING", 3)
    monkeypatch.setattr(trackers, "MAX_WAIT", 0.1)
    free = threading.Event()
    with caplog.at_level(logging.WARNING):
        slow, hanging = (Background(name, lambda: free.wait() and Recorder) for name in ("slow", "hanging"))
        start = time.monotonic()
        for step in range(100):
            slow.scalars(step, {"x": 1.0})
        slow.close(True)
        hanging.scalars(1, {"x": 1.0})
        hanging.close(True)
        assert time.monotonic() - start < 20
    free.set()
    assert [record.getMessage() for record in caplog.records] == [
        "logger=slow: is too slow; it is left out from here on",
        "logger=hanging: has not sent everything within 0 s; it is left out from here on",
    ]


def test_a_resumed_run_continues_and_a_job_names_its_sweep(tmp_path: Path, recorder: type[Recorder]) -> None:
    (tmp_path / SWEEP).touch()
    run = run_in(tmp_path / "lr-0.1" / "x", LOGGERS)
    run_in(run, LOGGERS, "training.max_steps=3")
    first, second = (each[1] for each in recorder.calls if each[0] == "begin")
    assert (first.id, second.id) == (None, "made-here")
    assert (first.name, first.group) == ("lr-0.1/x", "/".join(tmp_path.parts[-2:]))
    assert [each[1] for each in recorder.calls if each[0] == "close"] == [True, True]


def test_a_run_that_was_stopped_is_not_finished(tmp_path: Path, recorder: type[Recorder]) -> None:
    def killed(*_: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(validated(TrainConfig, values_of("train", [*TINY, *QUICK, LOGGERS])), tmp_path / "run", [], None, killed)
    assert recorder.calls[-1] == ("close", False)


def test_without_tensorboard_it_writes_nothing(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", "logger=[]")
    assert not (run / "tensorboard").exists()
    assert (run / "metrics.jsonl").is_file()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("logger=[tensorboard,nonesuch]", "logger[1]=nonesuch: not one of tensorboard, wandb, mlflow, aim"),
        ("logger=[tensorboard,mlflow]", 'logger=mlflow: needs another package: pip install "nmt[mlflow]"'),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_written(
    word: str, message: str, tmp_path: Path, tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "mlflow" else True)  # the command is a fork
    done = call("nmt-train", *tiny_overrides, word, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert (done.returncode, done.stderr.decode().splitlines()[-1]) == (2, f"nmt-train: error: {message}")
    assert not (tmp_path / "run").exists()


# With the packages themselves, where they are installed: stores on this disk, no network.


def twice(folder: Path, *overrides: str) -> tuple[Path, str]:
    """A run that was resumed, and its identifier."""
    name = overrides[0].partition(",")[2].rstrip("]")
    run = run_in(folder, SAMPLES, *overrides, given=["optimizer.lr=0.1"])
    before = read_json(run / trackers.IDS)[name]
    run_in(folder, SAMPLES, *overrides, "training.max_steps=3")
    assert read_json(run / trackers.IDS) == {name: before}
    assert "logger=" not in (run / "train.log").read_text()
    return run, before


def rounded(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, pytest.approx(value, rel=1e-5)) for step, value in points]


def test_mlflow_keeps_it_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # of pictures
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run, number = twice(tmp_path / "run", "logger=[tensorboard,mlflow]", f"tracking.mlflow_uri={uri}")
    client = mlflow.MlflowClient(tracking_uri=uri)
    (kept,) = client.search_runs([client.get_experiment_by_name("nmt").experiment_id])
    assert kept.info.run_id == number
    assert kept.info.status == "FINISHED"
    assert kept.data.params["encoder.hidden"] == "16"
    assert kept.data.tags["optimizer.lr"] == "0.1"
    for tag, points in curves(run).items():
        if not tag.startswith("best/"):  # those of the first end remain
            assert [(each.step, each.value) for each in client.get_metric_history(number, tag)] == rounded(points)
    assert kept.data.metrics["best/test_bleu"] == pytest.approx(curves(run)["best/test_bleu"][-1][1])
    assert len(client.list_artifacts(number, "validation/samples")) == 3
    assert [each.path for each in client.list_artifacts(number, "images")]
    # What a killed run has sent is not sent again.
    resumed = MLflow(Experiment("nmt", "run", None, {}, {}, number), uri)
    for step in (2, 3, 4):
        resumed.scalars(step, {"train/loss": 1.0})
    assert [each.step for each in client.get_metric_history(number, "train/loss")] == [1, 2, 3, 4]


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, which has the format of LevelDB's log after a header of seven bytes."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # the end of a block is filled up
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_keeps_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run, number = twice(tmp_path / "run", "logger=[tensorboard,wandb]")
    found: dict[str, list[tuple[int, float]]] = {}
    names: set[str] = set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            names |= {record.run.run_id} - {""}
            if record.run.config.update:
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert config["encoder"]["hidden"] == 16
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for tag, value in items.items():
                if isinstance(value, int | float) and not tag.startswith("_"):
                    found.setdefault(tag, []).append((record.history.step.num or items["_step"], value))
    assert names == {number}
    expected = {tag: rounded(points) for tag, points in curves(run).items() if not tag.startswith("best/")}
    assert {tag: found[tag] for tag in expected} == expected
    assert [step for step, _ in found["alignment/1/height"]] == [1, 2, 3]  # of a picture


def test_aim_keeps_it_in_a_folder(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim")
    (tmp_path / "repo").mkdir()
    run, number = twice(tmp_path / "run", "logger=[tensorboard,aim]", f"tracking.aim_repo={tmp_path / 'repo'}")
    kept = aim.Run(
        number,
        repo=str(tmp_path / "repo"),
        force_resume=True,
        system_tracking_interval=None,
        capture_terminal_logs=False,
    )
    assert kept["config"]["encoder"]["hidden"] == 16
    assert kept.tags == ["optimizer.lr=0.1"]
    found = {}
    for metric in kept.metrics():
        table = metric.dataframe().sort_values("step")
        found[metric.name] = list(zip(table["step"], table["value"], strict=True))
    kept.close()
    assert found == {tag: rounded(points) for tag, points in curves(run).items() if not tag.startswith("best/")}
