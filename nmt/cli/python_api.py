"""Training, evaluation and comparison as functions, for programs and notebooks.

Arguments are overrides as on the command line, such as "attention=luong_dot". A mistake raises UserError with the
command's message. Hydra keeps no state between calls. (`nmt.evaluate` and `nmt.compare` are packages: therefore
evaluation is a method of a run, and the function that compares runs is `nmt.compare_runs`.)
"""

import base64
import html
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tabulate
import torch

from nmt.cli.compose import compose, new_run, resumed_run
from nmt.cli.evaluate import compare, evaluate
from nmt.cli.run_command import log_to_stream
from nmt.config import schema
from nmt.config.errors import UserError, override_values, quoted, user_path
from nmt.evaluate.metrics import METRICS
from nmt.system.distributed import Interrupted, ProcessGroup
from nmt.system.run import FINISHED, RunDirectory, read_json
from nmt.training.job import train_run
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
SHOWN = (*METRICS, "aer")


class Scores(dict[str, Any]):
    """The scores of a run on one split, as nmt-evaluate prints them. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return _table([{name: self[name] for name in SHOWN if self.get(name) is not None}])


@dataclass(frozen=True)
class Run:
    """A trained run. In a notebook, a run is displayed as its scores and the first heatmap of its test set."""

    path: Path

    @property
    def scores(self) -> dict[str, Scores]:
        """The scores in results.json, such as `scores["validation"]["bleu"]`, BLEU of the best checkpoint."""
        return {split: Scores(values) for split, values in read_json(RunDirectory(self.path).results).items()}

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, one for each logged step; values have the same names as in TensorBoard."""
        lines = RunDirectory(self.path).metrics.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def translator(self, checkpoint: str = "best") -> Translator:
        """Load the model of a checkpoint, "best" or "last"."""
        return Translator.load(self.path, checkpoint=checkpoint)

    def evaluate(self, *overrides: str) -> Scores:
        """Score the run on a split, for example with `run.evaluate("split=validation", "search.beam_size=10")`.

        Takes the keys of nmt-evaluate except `run`, `output` and `processes`. Writes the same files into the run as
        nmt-evaluate. Raises UserError for a mistake.
        """
        log_to_stream(sys.stderr)
        for key in ("run", "output", "processes"):
            if any(word.lstrip("+").startswith(f"{key}=") for word in overrides):
                raise UserError(f"{key}=: only nmt-evaluate takes this key; a run scores itself in one process")
        words = [f"run={quoted(self.path)}", *overrides]
        return Scores(evaluate(compose("evaluate", schema.EvaluateConfig, words), ProcessGroup()))

    def _repr_html_(self) -> str:
        rows = [
            {"split": split, **{name: values[name] for name in SHOWN if values.get(name) is not None}}
            for split, values in self.scores.items()
        ]
        pictures = sorted(RunDirectory(self.path).alignments.glob("*/1.png"))[:1]
        images = [base64.b64encode(path.read_bytes()).decode() for path in pictures]
        return "".join(
            [
                f"<p>{html.escape(str(self.path))}</p>",
                _table(rows),
                *(f'<img alt="attention" src="data:image/png;base64,{image}">' for image in images),
            ]
        )


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs. In a notebook, a comparison is displayed as its table."""

    folder: Path

    @property
    def page(self) -> Path:
        """The path of the comparison's page, to open in a browser."""
        return self.folder / "index.html"

    @property
    def values(self) -> dict[str, Any]:
        """The content of comparison.json, which docs/run.md describes."""
        return read_json(self.folder / "comparison.json")

    def __str__(self) -> str:
        return (self.folder / "comparison.md").read_text(encoding="utf-8")

    def _repr_markdown_(self) -> str:
        return str(self)


def train(*overrides: str, data: str | Mapping[str, object] | None = None, directory: str | Path | None = None) -> Run:
    """Train and evaluate a model, as nmt-train does. With "run=DIR", resume a run; a finished run is not trained again.

    `data` is a choice of the configuration group `data`, such as "demo", or the settings of data=files, such as
    {"train": "corpus/train", "validation": "corpus/valid"}. `directory` is the directory of a new run, by default
    outputs/train/DATE/TIME.

    Raises UserError for a mistake. On Ctrl-C during training, the function saves a checkpoint and raises
    KeyboardInterrupt. To continue, call `train` again with "run=DIR".
    """
    log_to_stream(sys.stderr)
    words = [*_data_overrides(data), *overrides]
    if override_values(words).get("run") is not None:
        request = resumed_run(words)
        if directory is not None:
            raise UserError(f"run={request.directory} resumes a run in its own directory; leave directory out")
    else:
        request = new_run(words)
        if directory is not None:
            request = request._replace(directory=user_path(directory))
    path = request.directory.absolute()
    if request.config.processes != 1:
        raise UserError("processes=: several processes are for nmt-train; a program trains in one")
    if request.is_complete(FINISHED):
        log.info("%s: already finished: skipped", path)
        return Run(path)
    threads = torch.get_num_threads()
    try:
        run = train_run(request.config, path, request.overrides, request.choices)
    except Interrupted as stop:
        raise KeyboardInterrupt(f'stopped by {stop}; go on with nmt.train("run={path}")') from None
    finally:
        torch.set_num_threads(threads)
    return Run(run.path)


def compare_runs(
    runs: Run | str | Path | Sequence[Run | str | Path], *overrides: str, output: str | Path | None = None
) -> Comparison:
    """Rank runs and test their differences, as nmt-compare does, for example with
    `nmt.compare_runs(runs, "baseline=none")`.

    `output` is the folder for the tables and the page, by default outputs/compare/DATE/TIME. Raises UserError for a
    mistake.
    """
    log_to_stream(sys.stderr)
    runs = [runs] if isinstance(runs, Run | str | Path) else runs
    paths = ",".join(quoted(run.path if isinstance(run, Run) else user_path(run)) for run in runs)
    words = [f"runs=[{paths}]", *([] if output is None else [f"output={quoted(output)}"]), *overrides]
    return Comparison(compare(compose("compare", schema.CompareConfig, words))[1])


def _data_overrides(data: str | Mapping[str, object] | None) -> list[str]:
    """Convert the argument `data` of `train` to overrides."""
    if data is None:
        return []
    if isinstance(data, str):
        return [f"data={data}"]
    return ["data=files", *(f"data.{key}={quoted(value)}" for key, value in data.items())]


def _table(rows: list[dict[str, Any]]) -> str:
    return str(tabulate.tabulate(rows, headers="keys", tablefmt="html", floatfmt=".2f"))
