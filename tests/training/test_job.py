"""Whole runs: resumed to the same bits, stopped by signals, refused where they would overwrite another run."""

import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_config
from fitting import fitted, metrics, same, state, stopped, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nmt.config.errors import UserError
from nmt.data.prepared_corpus import Split
from nmt.model.checkpoints import read_checkpoint
from nmt.system.run import RunDirectory
from nmt.training import loop
from nmt.training.job import train, train_run
from nmt.training.trainer import Trainer, Update

STEPS = ["training.max_epochs=2", "training.log_every=3", "validation.unit=steps", "validation.every=8"]


def kill(*_: object) -> bool:
    """Stand in for an observer, and end the run after its first validation."""
    raise KeyboardInterrupt


def finished(run: Path, *overrides: str) -> Path:
    return train_run(tiny_config(*STEPS, *overrides), run).path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run without interruption. Tests must not change it."""
    return finished(tmp_path_factory.mktemp("trained"), "validation.samples=1")


@pytest.fixture
def whole(trained: Path, tmp_path: Path) -> Path:
    """Copy the run `trained`; a test may change the copy."""
    return shutil.copytree(trained, tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "at"),
    [
        (signal.SIGINT, 8),
        *(pytest.param(number, 11, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)),
    ],
)  # at update 8 a validation follows
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(
    number: signal.Signals, at: int, whole: Path, tmp_path: Path
) -> None:
    handler = signal.getsignal(number)
    run = stopped(tiny_config(*STEPS), tmp_path / "stopped", at, number)
    assert state(run)["step"] == at
    assert not (run / "results.json").exists()
    assert signal.getsignal(number) == handler
    assert train(tiny_config(*STEPS), run) == 0
    assert same(weights(run), weights(whole))
    assert metrics(run) == metrics(whole)
    best = Path("checkpoints", "best.safetensors")
    assert (run / best).read_bytes() == (whole / best).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [["attention=hard", "training.batch_sentences=8"], ["training.r_drop=5", "decoder=lstm", "decoder.layers=2"]],
)
def test_every_objective_goes_on_in_the_same_bits(objective: list[str], tmp_path: Path) -> None:
    config, whole = tiny_config(*objective, "training.max_steps=5", "training.log_every=1"), tmp_path / "whole"
    assert train(config, whole) == 0
    run = stopped(config, tmp_path / "stopped", 3)
    assert train(config, run) == 0
    assert same(weights(run), weights(whole))
    assert metrics(run) == metrics(whole)
    (logged, *_) = [line for line in metrics(whole) if "train/loss" in line]
    assert ("train/r_drop_loss" in logged) == (config.training.r_drop > 0)


def test_the_run_directory_holds_what_the_run_needs_and_ran_with(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names >= {"config.yaml", "manifest.json", "train.log", "metrics.jsonl", "tensorboard", "checkpoints"}
    assert names >= {"tokenizer.model", "hypotheses", "results.json", "alignments", "data"}
    manifest = json.loads((trained / "manifest.json").read_text())
    assert manifest["seed"] == 1
    assert len(manifest["data"]["fingerprint"]) == 64
    assert manifest["starts"][0]["versions"]["torch"]
    assert manifest["parameters"] > 0
    assert manifest["training"]["steps"] == state(trained)["step"]
    results, log = json.loads((trained / "results.json").read_text()), (trained / "train.log").read_text()
    assert "test: BLEU" in log
    for split in ("validation", "test"):
        assert {"bleu", "chrf", "ter", "signatures", "sentences_per_second", "aer"} <= set(results[split])
        assert len((trained / "hypotheses" / f"{split}.txt").read_text().splitlines()) == 8
        assert len(list((trained / "alignments" / split).glob("*.png"))) == 1
        assert f"round trip BLEU {manifest['data']['splits'][split]['round_trip_bleu']:.2f}" in log


def test_metrics_and_tensorboard_hold_what_was_measured(trained: Path) -> None:
    lines = metrics(trained)
    first = next(line for line in lines if "train/loss" in line)
    assert math.exp(first["train/loss"]) == pytest.approx(first["train/perplexity"])
    assert first["train/smoothed_loss"] != pytest.approx(first["train/loss"])
    validations = {line["step"]: line["validation/bleu"] for line in lines if "validation/bleu" in line}
    assert len(validations) >= 3
    best = json.loads((trained / "results.json").read_text())["validation"]["bleu"]
    assert best == pytest.approx(max(validations.values()), abs=1e-4)
    events = EventAccumulator(str(trained / "tensorboard"), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert scalars >= {f"train/{name}" for name in ("loss", "perplexity", "learning_rate", "gradient_norm")}
    assert scalars >= {"train/tokens_per_second", "validation/loss", "validation/bleu"}
    assert [event.step for event in events.Scalars("validation/bleu")] == list(validations)
    assert [event.step for event in events.Images("alignment/1")] == list(validations)
    assert {"config/text_summary", "validation/samples/text_summary"} <= set(events.Tags()["tensors"])


@pytest.mark.slow
def test_the_perplexity_of_a_variational_attention_is_that_of_its_bound(tmp_path: Path) -> None:
    run = finished(tmp_path, "attention=variational", "attention.alignment.dim=4", "training.max_steps=3")
    logged = next(line for line in metrics(run) if "train/loss" in line)
    assert logged["train/kl_loss"] > 0
    assert math.exp(logged["train/loss"] + logged["train/kl_loss"]) == pytest.approx(logged["train/perplexity"])


def test_without_attention_there_is_no_heatmap_and_no_aer(tmp_path: Path) -> None:
    run = tmp_path / "none"
    assert train(tiny_config("attention=none", "validation.samples=1", "training.max_steps=2"), run) == 0
    assert "aer" not in json.loads((run / "results.json").read_text())["test"]
    assert not list((run / "alignments").rglob("*.png"))


def test_what_failed_before_its_first_checkpoint_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Split, "alignments", None)
        with pytest.raises(UserError, match="has no gold word alignments"):
            train(tiny_config(*STEPS, "validation.monitor=aer", "data.train_size=310"), run, ["wrong"])
    for name in ("data/test.alignments", "data/other.source", "source.model"):  # as of a failed start with other values
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("0-0\n")
    assert train(tiny_config("training.max_steps=2"), run, ["right"]) == 0
    assert not (run / "source.model").exists()
    assert not (run / "data" / "other.source").exists()
    (start,) = json.loads((run / "manifest.json").read_text())["starts"]
    assert start["overrides"] == ["right"]
    (run / "results.json").unlink()
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    (run / "results.json").write_text("{}")  # a run whose checkpoints somebody deleted
    with pytest.raises(UserError, match="holds a run of another configuration"):
        train(tiny_config(*STEPS, "seed=9"), run)


def test_a_finished_run_can_be_made_longer(whole: Path) -> None:
    before, longer = state(whole)["step"], tiny_config(*STEPS, "training.max_epochs=3")

    with pytest.raises(KeyboardInterrupt):
        train(longer, whole, observer=kill)
    assert json.loads((whole / "manifest.json").read_text())["status"] is None
    assert train(longer, whole) == 0
    assert state(whole)["step"] == before * 3 // 2
    steps = [line["step"] for line in metrics(whole) if "validation/bleu" in line]
    assert steps == sorted(set(steps))


def change_corpus(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["data"]["content"] = "0" * 64
    (run / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "length", "message"),
    [
        (lambda _: None, "max_steps=1", r"training\.max_steps=1: the run has already made \d+ updates"),
        (change_corpus, "max_epochs=9", r"the corpus \(data\.\*\) or its tokenizer \(tokenizer\.\*\) has changed"),
        (
            lambda run: (run / "checkpoints" / "last.pt").unlink(),
            "max_epochs=9",
            r"its checkpoints/last\.pt is gone.*nmt-evaluate.*training\.start_from=",
        ),
    ],
)
def test_what_would_spoil_a_run_is_refused(
    change: Callable[[Path], None], length: str, message: str, whole: Path
) -> None:
    change(whole)
    before = [(whole / name).read_bytes() for name in ("config.yaml", "checkpoints/best.safetensors")]
    with pytest.raises(UserError, match=message):
        train(tiny_config(*STEPS, f"training.{length}"), whole)
    assert [(whole / name).read_bytes() for name in ("config.yaml", "checkpoints/best.safetensors")] == before


def test_scores_of_a_checkpoint_go_with_it(tmp_path: Path) -> None:
    always = ["validation.unit=steps", "validation.every=2", "validation.monitor=loss", "optimizer.lr=0.01"]
    assert train(tiny_config(*always, "training.max_steps=2"), tmp_path / "run") == 0
    assert (tmp_path / "run" / "results.json").exists()

    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(*always, "training.max_steps=20"), tmp_path / "run", observer=kill)
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors")["step"] == 4
    assert not (tmp_path / "run" / "results.json").exists()


def test_a_limit_of_steps_ends_a_run_and_its_cosine(tmp_path: Path) -> None:
    parts = ["training.accumulate=50", "training.batch_sentences=3"]  # more parts than sentences are allowed
    config = tiny_config("training.max_steps=7", "training.max_epochs=9", "schedule.warmup_steps=2", *parts)
    fitted(config, tmp_path / "run")
    assert state(tmp_path / "run")["step"] == 7
    rate = metrics(tmp_path / "run")[-2]["train/learning_rate"]
    assert rate == pytest.approx(config.optimizer.lr * 0.02)


def test_checkpoints_between_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    real = loop.save_checkpoint

    def save(path: Path, values: dict[str, Any]) -> None:
        saved.append((path.name, values["step"]))
        real(path, values)

    monkeypatch.setattr(loop, "save_checkpoint", save)
    fitted(tiny_config("training.max_steps=9", "training.checkpoint_every=4"), tmp_path / "run")
    assert [step for name, step in saved if name == "last.pt"] == [4, 8, 9]


def test_non_finite_gradients_are_skipped_counted_and_in_the_end_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Trainer.update
    calls: list[int] = []

    def broken(self: Trainer, *given: Any) -> Update:  # noqa: ANN401
        calls.append(1)
        update = real(self, *given)
        return update._replace(applied=len(calls) < 4 or len(calls) == 5)

    monkeypatch.setattr(Trainer, "update", broken)
    config = tiny_config("training.max_bad_steps=3", "training.checkpoint_every=1", "training.log_every=1")
    with pytest.raises(UserError, match=r"3 non-finite losses or gradients in a row \(training\.max_bad_steps\)"):
        fitted(config, tmp_path / "run")
    assert len(calls) == 8
    told = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(told) == 4
    pairs = [int(number) for number in re.findall(r"\d+", told[0].partition("(pairs")[2].partition(" of ")[0])]
    assert told[0].startswith("step 4: non-finite loss or gradient, skipped (pairs ")
    assert pairs == sorted(set(pairs))
    assert len(pairs) > 1
    assert metrics(tmp_path / "run")[-1]["train/bad_steps"] == 1
    assert state(tmp_path / "run")["step"] == 7


def test_a_run_has_finished_as_long_as_it_has_its_scores(whole: Path) -> None:
    config, run = tiny_config(*STEPS, "validation.samples=1"), RunDirectory(whole)
    values, corpus = config.model_dump(mode="json"), json.loads(run.manifest.read_text())["data"]["fingerprint"]
    assert run.has_finished(values, corpus)
    assert run.has_finished({**values, "threads": 7}, corpus)
    assert not run.has_finished(values, "another corpus")
    assert not run.has_finished({**values, "seed": 7}, corpus)
    for section, change in (("training", {"max_epochs": 3}), ("validation", {"samples": 3})):
        assert not run.has_finished({**values, section: values[section] | change}, corpus)
    before, best = json.loads(run.results.read_text()), (run.checkpoints / "best.safetensors").read_bytes()
    run.results.unlink()
    assert not run.has_finished(values, corpus)
    assert train(config, whole) == 0  # evaluates again
    after = json.loads(run.results.read_text())
    assert {split: after[split]["bleu"] for split in after} == {split: before[split]["bleu"] for split in before}
    assert (run.checkpoints / "best.safetensors").read_bytes() == best


def test_an_observer_hears_each_validation_and_may_end_the_run(tmp_path: Path) -> None:
    heard: list[tuple[float, float]] = []

    def observe(epochs: float, score: float) -> bool:
        heard.append((epochs, score))
        return len(heard) == 2

    assert train(tiny_config(*STEPS), tmp_path / "run", observer=observe) == 0
    lines = [line for line in metrics(tmp_path / "run") if "validation/bleu" in line]
    assert heard == [(pytest.approx(line["epoch"], abs=1e-4), line["validation/bleu"]) for line in lines]
    assert len(heard) == 2
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["status"] == "pruned"
    assert manifest["training"]["steps"] == 16
    assert not (tmp_path / "run" / "results.json").exists()
    values, corpus = tiny_config(*STEPS).model_dump(mode="json"), manifest["data"]["fingerprint"]
    assert RunDirectory(tmp_path / "run").has_finished(values, corpus)


def test_tensorboard_knows_what_was_chosen_and_what_came_of_it(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    run = tmp_path / "run"
    overrides = ["optimizer.lr=0.01", "seed=3", "device=cpu", "attention/score=dot", "decoder.residual=false"]
    choices = {"attention": "luong_general", "attention/window": "global"}
    assert train(tiny_config("optimizer.lr=0.01", "seed=3", "training.max_steps=3"), run, overrides, choices) == 0
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    told = metadata.parse_session_start_info_plugin_data(content).hparams
    assert {name: value.string_value or value.number_value for name, value in told.items()} == {
        "attention": "luong_general",
        "attention/score": "dot",
        "decoder.residual": "false",
        "optimizer.lr": 0.01,
        "seed": 3.0,
    }
    assert events.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.plugin_name == "hparams"
    results = json.loads((run / "results.json").read_text())
    for split in ("validation", "test"):
        for key in ("bleu", "chrf", "ter", "aer"):
            (event,) = events.Scalars(f"best/{split}_{key}")
            assert event.value == pytest.approx(results[split][key], rel=1e-5)


def test_what_a_run_does_not_reach_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fitted(tiny_config("training.max_steps=2", "schedule.warmup_steps=3", "attention=coverage"), tmp_path / "run")
    assert "attention.coverage.loss_start=1000: the run ends before, at step 2" in caplog.text
    assert "schedule.warmup_steps=3: the run ends before, at step 2, and never reaches optimizer.lr" in caplog.text


LARGER = (
    "attention=luong_general decoder.input_feeding=false search.max_length=80 data.train_size=3000 "
    "data.validation_size=60 data.test_size=60 data.max_length=30 tokenizer=word "
    "tokenizer.vocab_size=1000 embedding.dim=64 encoder.hidden=64 decoder.hidden=128 optimizer.lr=0.008 "
    "training.batch_tokens=1024 training.max_epochs=8 training.label_smoothing=0.0 embedding.dropout=0.1 "
    "encoder.dropout=0.1 decoder.dropout=0.1 validation.every=8"
)


@pytest.mark.slow
@pytest.mark.system
def test_attention_learns_the_demo_and_its_alignments(tmp_path: Path) -> None:
    assert train(tiny_config(*LARGER.split()), tmp_path) == 0
    test = json.loads((tmp_path / "results.json").read_text())["test"]
    assert test["bleu"] > 50
    assert test["aer"] < 0.2
