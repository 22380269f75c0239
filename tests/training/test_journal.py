"""The outputs of a journal: metrics.jsonl, TensorBoard files as TensorBoard reads them, W&B."""

import html
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from unittest.mock import call as call_of

import numpy as np
import pytest
from conftest import tiny_config
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import writer

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.system.run import SWEEP, RunDirectory, read_json
from nmt.training import journal
from nmt.training.job import Job, fit, set_up, train
from nmt.training.journal import Journal

QUICK = ["training.max_steps=2", "validation.unit=steps", "validation.every=1", "training.log_every=1"]
REST = {"perplexity": 1.0, "learning_rate": 1.0, "tokens_per_second": 1.0, "utilisation": 0.5, "seconds_left": 1.0}


def config_of(*overrides: str) -> TrainConfig:
    return tiny_config(*QUICK, *overrides)


def read(run: Path, tag: str) -> list[tuple[int, np.ndarray]]:
    """Read by TensorBoard's loader all that it shows of a tag: pairs (step, values)."""
    events = EventAccumulator(str(run / "tensorboard")).Reload().Tensors(tag)
    return [(event.step, make_ndarray(event.tensor_proto)) for event in events]


def curve(run: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    return [(step, float(value)) for step, value in read(run, tag)]


def write(run: Path, logged_step: int, steps: range, value: float) -> None:
    with Journal(RunDirectory(run), config_of()) as opened:
        opened.begin(logged_step, logged_step, 0, 10)
        for step in steps:
            opened.training(step, 0.0, {"loss": value, **REST})
        opened.flush()
        assert curve(run)[-1] == (steps[-1], value)  # written before the journal is closed


def test_a_resumed_run_supersedes_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """This holds in TensorBoard and in metrics.jsonl. A new run supersedes all earlier lines."""

    def shown() -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert curve(tmp_path) == [(line["step"], line["train/loss"]) for line in lines]
        return curve(tmp_path)

    write(tmp_path, -1, range(10), value=1)
    write(tmp_path, 5, range(6, 8), value=2)  # ends before the first run did, whose steps 8 and 9 go too
    values = [*[(step, 1) for step in range(6)], (6, 2), (7, 2)]
    assert shown() == values
    write(tmp_path, 6, range(7, 9), value=3)
    assert shown() == [*values[:7], (7, 3), (8, 3)]
    write(tmp_path, -1, range(2), value=4)
    assert shown() == [(0, 4), (1, 4)]


def test_lines_that_will_be_written_again_are_removed(tmp_path: Path) -> None:
    """A run stopped during the validation of step 8 has logged that step, but not validated it."""
    lines = [{"step": 4, "train/loss": 1}, {"step": 4, "validation/loss": 1}, {"step": 8, "train/loss": 1}]
    again = [{"step": 8, "validation/loss": 1}, {"step": 9, "train/loss": 1}, {"step": 12, "validation/loss": 1}]
    path = tmp_path / "metrics.jsonl"
    text = "".join(f"{json.dumps(line)}\n" for line in lines + again)
    path.write_bytes(b"\x00\xff\x07\n{\n" + text.encode() + b'{"step": 8, "tr')
    journal.truncate_after(path, step=8, validated=4)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines
    journal.truncate_after(path, step=4, validated=8)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:2]


def page(run: Path, tag: str) -> list[list[str]]:
    """Return the cells of the table that TensorBoard shows, as text."""
    ((_, text),) = read(run, f"{tag}/text_summary")
    rows = re.findall(r"<tr>(.*?)</tr>", markdown_to_safe_html(text.item().decode()), re.DOTALL)
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    assert not any("<" in cell for row in cells for cell in row)  # no text was turned into markup
    return [[html.unescape(cell) for cell in row] for row in cells]


SAMPLES = [
    ("<s> a | b </s>", "*x* _y_ `z`", "[link](http://a.b) <script>alert(1)</script>"),
    ("# no heading", "- no list", "1. \\| & &amp; &#42; http://a.b"),
    ("", "---", "![picture](x.png)"),
    ("two\nlines", "tab\there", "une zone économique « européenne » 東京"),
]


def test_samples_are_shown_literally(tmp_path: Path) -> None:
    samples: Any = [
        (SimpleNamespace(source=source, reference=reference, translation=SimpleNamespace(text=text, alignment=None)))
        for source, reference, text in SAMPLES
    ]
    with pytest.MonkeyPatch.context() as patch, Journal(RunDirectory(tmp_path), config_of()) as opened:
        patch.setattr(journal, "sample_figures", lambda *_: {})
        opened.begin(-1, -1, 0, 10)
        opened.samples(2, samples)
    shown = [[" ".join(cell.split()) for cell in row] for row in SAMPLES]
    assert page(tmp_path, "validation/samples") == [["source", "reference", "hypothesis"], *shown]


# W&B, with a stand-in for its package


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Mock:
    package = Mock()
    package.init.return_value = SimpleNamespace(id="of-wandb", finish=package.finish)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(journal, "find_spec", lambda _: True)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return package


REFUSAL = ConnectionError("no route to host\ndetails")


def run_in(folder: Path, *overrides: str, given: list[str] | None = None) -> Path:
    """Train and record an outcome, but skip the evaluation, which takes most of the time."""
    config = config_of(*overrides)
    with Job.join(config, folder) as job:
        setup = set_up(job, given or [])
        with Journal(job.run, config) as opened:
            fit(setup, opened)
            opened.outcome(setup.trainer.step, {"best/test_bleu": 1.5})
    return folder


def test_a_sweeps_run_begins_before_tensorboards_files_and_continues_when_it_resumes(
    tmp_path: Path, wandb: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    class Opened(writer.EventFileWriter):
        def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
            opened.append(wandb.init.call_count)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(writer, "EventFileWriter", Opened)  # W&B patches TensorBoard in this way
    (tmp_path / SWEEP).touch()
    run = run_in(tmp_path / "lr-0.1" / "x", "logger=wandb", given=["optimizer.lr=0.1"])
    run_in(run, "logger=wandb", "training.max_steps=3")
    first, second = (each.kwargs for each in wandb.init.call_args_list)
    assert opened == [1, 2]
    sweep = "/".join(tmp_path.parts[-2:])
    assert (first["project"], first["name"], first["group"]) == ("nmt", "lr-0.1/x", sweep)
    assert (first["sync_tensorboard"], first["tags"]) == (True, ["optimizer.lr=0.1"])
    assert first["config"]["encoder"]["hidden"] == 16
    assert [(one["id"], one["resume"]) for one in (first, second)] == [(None, "allow"), ("of-wandb", "allow")]
    assert read_json(run / journal.WANDB) == {"id": "of-wandb"}
    assert wandb.finish.call_args_list == [call_of(exit_code=0)] * 2


def test_a_tracker_that_refuses_the_run_or_is_not_installed_ends_it_in_one_line(
    tmp_path: Path, wandb: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.init.side_effect = REFUSAL
    with pytest.raises(UserError, match=r"^logger=wandb: cannot be used \(no route to host\); train without it$"):
        run_in(tmp_path / "run", "logger=wandb")
    monkeypatch.setattr(journal, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"^logger=wandb: needs another package: pip install wandb$"):
        train(config_of("logger=wandb"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_tracker_that_fails_at_the_end_is_a_warning(
    tmp_path: Path, wandb: Mock, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.finish.side_effect = REFUSAL
    opened = Journal(RunDirectory(tmp_path), config_of("logger=wandb"))
    opened.begin(-1, -1, 0, 10)
    opened.training(1, 0.0, {"loss": 1.0, **REST})
    opened.__exit__(KeyboardInterrupt, None, None)
    warnings = [record.getMessage() for record in caplog.records if "logger=" in record.getMessage()]
    assert warnings == ["logger=wandb: does not have the whole run (no route to host)"]
    wandb.finish.assert_called_once_with(exit_code=1)


def test_without_loggers_there_is_metrics_jsonl_alone(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", "logger=[]")
    assert not (run / "tensorboard").exists()
    assert not (run / journal.WANDB).exists()
    assert (run / "metrics.jsonl").is_file()
