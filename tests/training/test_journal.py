"""Trackers: W&B reads TensorBoard's files, MLflow gets the same values; a resumed run continues in both."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import TINY, values_of
from fitting import fitted, weights
from forks import call
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import writer

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.system.run import SWEEP, RunDirectory, read_json
from nmt.training import journal
from nmt.training.job import Job, build, fit, prepare

pytestmark = pytest.mark.system
QUICK = ["training.max_steps=2", "validation.unit=steps", "validation.every=1", "training.log_every=1"]
SAMPLES = "validation.samples=1"
BOTH = "logger=[wandb,mlflow]"


class Package(ModuleType):
    """Stands in for wandb and for mlflow: keeps the calls of its functions, (name, arguments, options) each."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fails_at = ""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)

        def record(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            self.calls.append((name, arguments, options))
            if name == self.fails_at:
                raise ConnectionError("no route to host\ndetails")
            return SimpleNamespace(
                id=options.get("id") or "of-wandb",
                info=SimpleNamespace(run_id=options.get("run_id") or "of-mlflow"),
                finish=lambda exit_code: record_as("finish", exit_code),
                wait=lambda: record_as("wait"),
            )

        def record_as(method: str, *arguments: Any) -> None:  # noqa: ANN401
            getattr(self, method)(*arguments)

        return record

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, options) for called, arguments, options in self.calls if called == name]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """W&B and MLflow."""
    made = {name: Package(name) for name in ("wandb", "mlflow")}
    for name, package in made.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(journal, "find_spec", lambda _: True)
    return SimpleNamespace(**made)


def run_in(folder: Path, *overrides: str, given: list[str] | None = None) -> Path:
    """Train and record an outcome, without the evaluation, which would take most of the time."""
    config = validated(TrainConfig, values_of("train", [*TINY, *QUICK, *overrides]))
    with Job.join(config, folder) as job:
        setup = build(job, prepare(job, given or [], {}))
        with journal.Journal(job.run, config) as opened:
            fit(setup, opened)
            opened.outcome(setup.trainer.step, {"best/test_bleu": 1.5})
    return folder


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"]
    return {tag: [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)] for tag in tags}


def test_mlflow_gets_what_tensorboard_gets(tmp_path: Path, packages: SimpleNamespace) -> None:
    given, mlflow = ["optimizer.lr=0.1", BOTH], packages.mlflow
    run = run_in(tmp_path / "run", SAMPLES, "logger=[tensorboard,mlflow]", "tracking.mlflow_uri=http://x", given=given)
    plain = run_in(tmp_path / "plain", SAMPLES)
    assert (mlflow.of("set_tracking_uri"), mlflow.of("set_experiment")) == ([(("http://x",), {})], [(("nmt",), {})])
    described = {"run_id": None, "run_name": f"{tmp_path.name}/run", "tags": {"optimizer.lr": "0.1"}}
    assert mlflow.of("start_run") == [((), described)]
    params: dict[str, Any] = {}
    for (part,), _ in mlflow.of("log_params"):
        assert len(part) <= 100
        params |= part
    assert (params["encoder.hidden"], params["training.max_steps"]) == (16, 2)
    sent: dict[str, list[tuple[int, Any]]] = {}
    for (values,), options in mlflow.of("log_metrics"):
        assert not options["synchronous"]  # training does not wait for a server
        for tag, value in values.items():
            sent.setdefault(tag, []).append((options["step"], pytest.approx(value, rel=1e-6)))
    assert curves(run) == sent
    assert "best/test_bleu" in sent
    names = [name for name, _, _ in mlflow.calls]
    assert names[-3:] == ["log_metrics", "wait", "end_run"]  # there is a folder of heatmaps after an evaluation only
    assert mlflow.of("end_run") == [(("FINISHED",), {})]
    assert read_json(run / journal.IDS) == {"mlflow": "of-mlflow"}
    # Nothing else differs, with or without.
    assert {tag: [step for step, _ in points] for tag, points in curves(plain).items()} == {
        tag: [step for step, _ in points] for tag, points in sent.items()
    }
    assert all(tensor.equal(weights(plain)[name]) for name, tensor in weights(run).items())
    assert not (plain / journal.IDS).exists()


def test_wandb_begins_before_the_files_that_it_reads(
    tmp_path: Path, packages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    class Opened(writer.EventFileWriter):
        def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
            opened.append(len(packages.wandb.of("init")))
            super().__init__(*arguments, **options)

    monkeypatch.setattr(writer, "EventFileWriter", Opened)  # as W&B does
    run = run_in(tmp_path / "run", "logger=wandb", "tracking.wandb_entity=me", given=["optimizer.lr=0.1"])
    ((_, options),) = packages.wandb.of("init")
    assert options["sync_tensorboard"]
    assert (options["project"], options["entity"], options["name"]) == ("nmt", "me", f"{tmp_path.name}/run")
    assert options["tags"] == ["optimizer.lr=0.1"]
    assert options["config"]["encoder"]["hidden"] == 16
    assert opened == [1]
    assert "best/test_bleu" in curves(run)
    assert packages.wandb.of("finish") == [((0,), {})]


def test_a_finished_run_leaves_its_heatmaps_in_mlflow(tmp_path: Path, packages: SimpleNamespace) -> None:
    (tmp_path / "run" / "alignments").mkdir(parents=True)
    run = RunDirectory(tmp_path / "run")
    config = validated(TrainConfig, values_of("train", [*TINY, "logger=mlflow"]))
    for finished in (False, True):
        trackers = journal.Trackers(run, config)
        trackers.open()
        trackers.close(finished)
        sent = packages.mlflow.of("log_artifacts")
        assert sent == ([((str(run.alignments), "alignments"), {})] if finished else [])


@pytest.mark.parametrize(("name", "method"), [("wandb", "init"), ("mlflow", "set_experiment"), ("mlflow", "start_run")])
def test_a_tracker_that_refuses_the_run_ends_it_in_one_line(
    name: str, method: str, tmp_path: Path, packages: SimpleNamespace
) -> None:
    getattr(packages, name).fails_at = method
    with pytest.raises(UserError, match=rf"^logger={name}: cannot be used \(no route to host\); train without it$"):
        run_in(tmp_path / "run", BOTH)
    assert packages.wandb.of("finish") == ([((1,), {})] if name == "mlflow" else [])


@pytest.mark.parametrize(("name", "method"), [("wandb", "finish"), ("mlflow", "wait"), ("mlflow", "end_run")])
def test_a_tracker_that_fails_at_the_end_is_a_warning(
    name: str, method: str, tmp_path: Path, packages: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(packages, name).fails_at = method
    run_in(tmp_path / "run", BOTH)
    warnings = [record.getMessage() for record in caplog.records if "logger=" in record.getMessage()]
    assert warnings == [f"logger={name}: does not have the whole run (no route to host)"]
    assert packages.wandb.of("finish")
    assert packages.mlflow.of("end_run")


def test_a_resumed_run_continues_and_a_job_names_its_sweep(tmp_path: Path, packages: SimpleNamespace) -> None:
    (tmp_path / SWEEP).touch()
    run = run_in(tmp_path / "lr-0.1" / "x", BOTH)
    described = len(packages.mlflow.of("log_params"))
    run_in(run, BOTH, "training.max_steps=3")
    begun = [options for _, options in packages.wandb.of("init")]
    assert [(options["id"], options["resume"]) for options in begun] == [(None, "allow"), ("of-wandb", "allow")]
    sweep = "/".join(tmp_path.parts[-2:])
    assert (begun[0]["name"], begun[0]["group"]) == ("lr-0.1/x", sweep)
    begun = [options for _, options in packages.mlflow.of("start_run")]
    assert [options["run_id"] for options in begun] == [None, "of-mlflow"]
    assert (begun[0]["run_name"], begun[0]["tags"]) == ("lr-0.1/x", {"sweep": sweep})
    assert len(packages.mlflow.of("log_params")) == described  # MLflow refuses a parameter that has changed
    assert [arguments for arguments, _ in packages.mlflow.of("end_run")] == [("FINISHED",)] * 2


def test_a_run_that_was_stopped_is_not_finished(tmp_path: Path, packages: SimpleNamespace) -> None:
    def killed(*_: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(validated(TrainConfig, values_of("train", [*TINY, *QUICK, BOTH])), tmp_path / "run", killed)
    assert packages.wandb.of("finish") == [((1,), {})]
    assert packages.mlflow.of("end_run") == [(("KILLED",), {})]


def test_without_tensorboard_it_writes_nothing(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", "logger=[]")
    assert not (run / "tensorboard").exists()
    assert (run / "metrics.jsonl").is_file()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("logger=[tensorboard,nonesuch]", "logger[1]=nonesuch: not one of tensorboard, wandb, mlflow"),
        ("logger=[tensorboard,aim]", "logger=aim: Aim was removed; use tensorboard, wandb or mlflow"),
        ("tracking.aim_repo=x", "tracking.aim_repo: Aim was removed; leave it out"),
        ("logger=[tensorboard,mlflow]", "logger=mlflow: needs another package: pip install mlflow"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_written(
    word: str, message: str, tmp_path: Path, tiny_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "find_spec", lambda name: None if name == "mlflow" else True)  # the command is a fork
    done = call("nmt-train", *tiny_overrides, word, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert (done.returncode, done.stderr.decode().splitlines()[-1]) == (2, f"nmt-train: error: {message}")
    assert not (tmp_path / "run").exists()


# With the packages themselves, where they are installed: stores on this disk, no network.


def twice(folder: Path, *overrides: str) -> tuple[Path, str]:
    """A run that was resumed, and its identifier."""
    name = overrides[0].partition(",")[2].rstrip("]")
    run = run_in(folder, SAMPLES, *overrides, given=["optimizer.lr=0.1"])
    before = read_json(run / journal.IDS)[name]
    run_in(folder, SAMPLES, *overrides, "training.max_steps=3")
    assert read_json(run / journal.IDS) == {name: before}
    assert "logger=" not in (run / "train.log").read_text()
    return run, before


def rounded(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, pytest.approx(value, rel=1e-5)) for step, value in points]


def test_mlflow_keeps_it_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # of artifacts
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
    assert {tag: [value for _, value in found[tag]] for tag in expected} == {
        tag: [value for _, value in points] for tag, points in expected.items()
    }


def test_lines_that_will_be_written_again_are_removed(tmp_path: Path) -> None:
    """A run stopped during the validation of step 8 has logged that step, but not validated it."""
    lines = [{"step": 4, "train/loss": 1}, {"step": 4, "validation/loss": 1}, {"step": 8, "train/loss": 1}]
    again = [{"step": 8, "validation/loss": 1}, {"step": 9, "train/loss": 1}, {"step": 12, "validation/loss": 1}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines + again) + '{"step": 8, "tr')
    journal.truncate_after(path, step=8, validated=4)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    journal.truncate_after(path, step=4, validated=8)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:2]


def test_damaged_lines_of_the_metrics_are_named_when_a_run_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "train/loss": 2.0}\n'
    path.write_bytes(good.encode() + b"\x00\xff\x07\n{\n" + good.encode() + b'{"step": 2, "tr')
    journal.truncate_after(path, 5, 5)
    assert path.read_text() == 2 * good
    assert "metrics.jsonl: damaged; 2 lines" in caplog.text
    caplog.clear()
    journal.truncate_after(path, 5, 5)
    assert caplog.text == ""
