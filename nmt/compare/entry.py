"""Find runs and sweeps, and read the outputs of runs and of other systems, with their test set and training records."""

import glob
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from nmt.config.checks import validated
from nmt.config.errors import UserError, for_shell, format_value, printable, user_path
from nmt.config.schema.commands import Evaluation
from nmt.data.text import open_text, user_lines
from nmt.data.word_alignment import alignment_error_rate, parse_pharaoh
from nmt.evaluate.evaluation import score_settings
from nmt.evaluate.metrics import METRICS, Counted, ScoreSettings, count
from nmt.system.files import folders_with, is_archive, read_bytes
from nmt.system.run import (
    ERROR,
    EVALUATION,
    FINISHED,
    SWEEP,
    RunDirectory,
    digest,
    load_values,
    read_json,
    text_lines,
)
from nmt.system.text_table import counted

LARGEST = 1e15  # of measured values, so that their sums and products stay finite
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """A test or validation set, with the settings by which outputs are scored on it."""

    sources: list[str]
    references: list[str]
    settings: ScoreSettings

    def difference(self, other: "HeldOut") -> str | None:
        """Say why scores on this set and on the other one are not comparable; None if they are."""
        for side in ("sources", "references"):
            pairs = zip_longest(getattr(self, side), getattr(other, side))
            for number, (line, other_line) in enumerate(pairs, 1):
                if line != other_line:
                    lines = f"line {number} of the {side} is {line!r} in the first, {other_line!r} in the second"
                    return f"the held-out sets differ: {lines}"
        if replace(other.settings, metrics=self.settings.metrics) != self.settings:
            return f"scores are computed differently: {self.settings} in the first, {other.settings} in the second"
        return None


class Validation(NamedTuple):
    """One validation during training."""

    updates: int
    epoch: float
    scores: Mapping[str, float]  # by metric
    perplexity: float | None


class Point(NamedTuple):
    """A point of a learning curve."""

    updates: int
    epoch: float
    score: float


@dataclass(frozen=True)
class Training:
    """The training of a run, as its manifest and metrics.jsonl record it; a field without a record is None or empty."""

    seconds: float | None = None  # duration of all updates, without validations
    updates: int | None = None
    update_seconds: float | None = None  # usual duration of one update, see `read`
    tokens_per_second: float | None = None  # target tokens, the mean over all updates
    perplexity: float | None = None  # validation perplexity of the best checkpoint
    machine: str = ""
    validations: Sequence[Validation] = ()

    @classmethod
    def read(cls, manifest: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> "Training":
        """Read the manifest and the records of metrics.jsonl. Raises ValueError, TypeError or KeyError for malformed
        values. `update_seconds` is the mean number of target tokens of an update, divided by the median of the logged
        speeds, which ignores times when the machine did other work."""
        training = manifest.get("training", {})
        seconds, updates, tokens, rate, best = (
            _in_range(training.get(key))
            for key in ("seconds", "steps", "target_tokens", "target_tokens_per_second", "best_step")
        )
        rates = [_in_range(speed) for record in metrics if (speed := record.get("train/tokens_per_second"))]
        steps = [int(_in_range(record["step"])) for record in metrics if "step" in record]
        validations = []
        for record in metrics:
            names = [name for name in METRICS if f"validation/{name}" in record]
            scores = {name: float(_in_range(record[f"validation/{name}"])) for name in names}
            perplexity = record.get("validation/perplexity")
            if perplexity is not None and perplexity > LARGEST:  # training has diverged
                perplexity = None
            if scores:
                step, epoch = int(_in_range(record["step"])), float(_in_range(record["epoch"]))
                validations.append(Validation(step, epoch, scores, _in_range(perplexity)))
        return cls(
            seconds=seconds or None,
            updates=updates or max(steps, default=None),
            update_seconds=tokens / updates / median(rates) if tokens and updates and rates else None,
            tokens_per_second=rate or None,
            perplexity=next((each.perplexity for each in reversed(validations) if each.updates == best), None),
            machine=describe_machine((manifest.get("starts") or [{}])[-1].get("machine", {})),
            validations=validations,
        )

    def curve(self, metric: str) -> list[Point]:
        """Return the learning curve of a metric, without validations that did not compute it."""
        return [Point(one.updates, one.epoch, one.scores[metric]) for one in self.validations if metric in one.scores]

    @property
    def cost(self) -> float | None:
        """Compute the seconds that all updates take at the run's usual speed, `update_seconds`; None if unknown."""
        return self.updates * self.update_seconds if self.updates and self.update_seconds else None


@dataclass(frozen=True)
class Entry:
    """One output to compare. Of a system that is not a run, all fields but name and hypotheses are None or empty."""

    name: str  # the run's directory, or the system's name
    hypotheses: Sequence[str]
    seed: int | None = None
    config: str = ""  # digest, equal for runs that differ only in seed, machine and the location of the same data
    choices: Mapping[str, Any] = field(default_factory=dict)  # group choices and overrides, by key
    aer: float | None = None  # percent
    parameters: int | None = None
    training: Training = field(default_factory=Training)
    sentences_per_second: float | None = None
    word_weights: Path | None = None  # file with the attention between words
    counted: Counted | None = None  # sentence statistics of the output, if they are known without its text


@dataclass(frozen=True)
class System:
    """The runs of one configuration, which differ only in their seed."""

    name: str
    entries: list[Entry]


def find_runs(names: Sequence[str]) -> dict[Path, bool]:
    """Find the runs that names lead to, each once, in order. A run is a directory or its archive (a zip file); a folder
    with the results of an evaluation counts too.

    A name is the path of a run, a pattern, or a folder that holds runs at any depth, where archives are not looked for.
    The value is True if a name is the path of the run itself. Warns of failed jobs of sweeps, which have no run. Raises
    UserError for a name without any run."""
    runs: dict[Path, bool] = {}
    first: dict[Path, Path] = {}  # from a resolved path to the first path that led to it
    for name in names:
        named = user_path(name)
        paths = [named] if named.exists() else [Path(path) for path in sorted(glob.glob(str(named), recursive=True))]
        for failed in (folder for path in paths for folder in folders_with(path, ERROR)):
            if not (failed / "config.yaml").is_file():
                message = read_bytes(failed / ERROR).decode(errors="replace").partition("\n")[0]
                log.warning("left out: %s: failed (%s)", failed, message)
        below = []
        for path in paths:
            is_run = (path / "config.yaml").is_file() or is_archive(path)
            below += [path] if is_run else folders_with(path, "config.yaml", EVALUATION)
        if not below:
            reason = "is neither a run nor a folder that holds runs" if paths else "no run or pattern matches"
            raise UserError(f"runs={name}: {reason}")
        for run in below:
            path = first.setdefault(run.resolve(), run)
            runs[path] = runs.get(path, False) or run == named
    return runs


def unfinished_sweeps(names: Sequence[str], entries: Iterable[Entry]) -> list[str]:
    """Say for each unfinished sweep how many of its jobs have no run in the entries. The sweeps are those in the named
    folders, and those of runs that are not named themselves."""
    runs, paths = [Path(entry.name).resolve() for entry in entries if entry.config], list(map(user_path, names))
    named = {path.resolve() for path in paths}
    within = [folder.resolve() for path in paths for folder in folders_with(path, SWEEP)]
    sentences = []
    for folder in dict.fromkeys([*within, *(run.parent for run in runs if run not in named)]):
        done, jobs = sum(folder in run.parents for run in runs), planned_jobs(folder)
        if done < jobs:
            sentences.append(f"{os.path.relpath(folder)}: unfinished: {jobs - done} of {jobs} runs are missing.")
    return sentences


def planned_jobs(directory: Path) -> int:
    """Read the number of jobs of the sweep in a directory; 0 if the number is unknown or there is no sweep."""
    try:
        return int(read_bytes(directory / SWEEP))
    except (OSError, ValueError):
        return 0


def read_run(path: Path, split: str) -> tuple[Entry, HeldOut]:
    """Read the output of a finished run. Raises UserError if the split's results are missing or a file is damaged."""
    try:
        return _read_run(path, split)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path}: a file of this run is damaged ({type(error).__name__}: {error})") from None


def _read_run(path: Path, split: str) -> tuple[Entry, HeldOut]:
    run = RunDirectory.existing(path, "runs") if path.is_file() else RunDirectory(path)
    sources, references, gold = run.held_out(split)
    fields, settings, command = (_read_evaluation if (path / EVALUATION).is_file() else _read_training)(run)
    results = read_json(run.results).get(split)
    output = run.hypotheses / f"{split}.txt"
    if results is None or not output.is_file():
        raise UserError(f"{path}: has no {split} results; run {command} split={split}")
    hypotheses = text_lines(output)
    if len(hypotheses) != len(references):
        sizes = f"{counted(len(hypotheses), 'line')} for {counted(len(references), 'sentence')}"
        raise UserError(f"{output}: has {sizes}; run {command} split={split}")
    if not run.is_archive and not (path / EVALUATION).is_file() and run.status() != FINISHED:
        log.warning("%s: its training has not finished; its best checkpoint so far is compared", run.path)
    aligned, words = run.alignments / f"{split}.references.pharaoh", run.alignments / f"{split}.words.jsonl"
    aer = None
    if gold is not None and aligned.is_file():
        links = [parse_pharaoh(line)[0] for line in text_lines(aligned)]
        aer = 100 * alignment_error_rate(links, [parse_pharaoh(line) for line in gold]).aer
    entry = Entry(
        name=printable(os.path.relpath(path)),
        hypotheses=hypotheses,
        aer=aer,
        sentences_per_second=_in_range(results.get("sentences_per_second")),
        word_weights=words if words.is_file() else None,
        **fields,
    )
    return entry, HeldOut(sources, references, settings)


def _read_training(run: RunDirectory) -> tuple[dict[str, Any], ScoreSettings, str]:
    """Read a trained run's fields of Entry, its score settings, and the command that evaluates it again."""
    values, manifest = load_values(run.config), run.read_manifest()
    try:  # without checking the whole configuration, so that runs of other versions can be read
        seed, settings = values["seed"], read_settings(values)
    except (KeyError, TypeError) as error:
        raise UserError(f"{run.config}: is not the configuration of a run ({error} is missing)") from None
    if not isinstance(seed, int):
        raise UserError(f"{run.config}: is not the configuration of a run (seed: {format_value(seed)})")
    fields = {
        "seed": seed,
        "config": run.system_digest(),
        "choices": run.recorded_choices(),
        "parameters": _in_range(manifest.get("parameters")),
        "training": Training.read(manifest, read_metrics(run.metrics)),
    }
    return fields, settings, f"nmt-evaluate {for_shell('run', run.source)}"


def read_settings(values: Mapping[str, Any]) -> ScoreSettings:
    """Make the score settings of a run from its saved configuration. Raises KeyError or TypeError for a missing value,
    and UserError for an invalid one or an unavailable tokenizer."""
    data = values["data"]
    languages = ",".join(dict.fromkeys(corpus["target_lang"] for corpus in data.get("corpora") or [data]))
    return score_settings(validated(Evaluation, values["evaluation"]), languages)


def _read_evaluation(folder: RunDirectory) -> tuple[dict[str, Any], ScoreSettings, str]:
    """Read from the folder of an evaluation, such as an ensemble's, what `_read_training` reads from a trained run."""
    values = read_json(folder.path / EVALUATION)
    parameters = _in_range(values["parameters"])
    fields = {"config": digest(values), "choices": dict(values["choices"]), "parameters": parameters}
    command = f"nmt-evaluate {for_shell('run', values['members'])} {for_shell('output', folder.path)}"
    return fields, score_settings(Evaluation(**values["evaluation"]), ""), command


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of metrics.jsonl, except a line that was cut short when the process was killed."""
    records = []
    for line in text_lines(path) if path.is_file() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Describe a machine as a manifest records it; empty if it is unknown."""
    counts = [f"{key}={machine[key]}" for key in ("threads", "processes") if machine.get(key)]
    return printable(", ".join(map(str, (*(machine[key] for key in ("name", "precision") if key in machine), *counts))))


def _in_range(value: Any) -> Any:  # noqa: ANN401
    """Return a measured value, or None, unchanged. Raises ValueError if it is negative or too large."""
    if value is not None and not 0 <= value <= LARGEST:
        raise ValueError(f"{value!r} is out of range")
    return value


def count_sentences(entry: Entry, held_out: HeldOut) -> Counted:
    """Return the sentence statistics of an output, which are counted unless its entry has them."""
    return entry.counted or count(entry.hypotheses, held_out.references, held_out.settings, sources=held_out.sources)


def read_systems(systems: Sequence[str], held_out: HeldOut) -> list[Entry]:
    """Read the outputs of other systems, each given as NAME=FILE. Raises UserError if one cannot be compared."""
    entries: dict[str, Entry] = {}
    for system in systems:
        name, _, file = system.partition("=")
        if not name or not file:
            raise UserError(f"systems={system}: expected NAME=FILE, a name and a file of translations")
        if name in entries:
            raise UserError(f"systems={system}: there are two systems named {name}")
        path = user_path(file)
        try:
            with open_text(path) as opened:
                lines = list(user_lines(f"systems={system}: {path}", opened))
        except OSError as error:
            raise UserError(f"systems={system}: {path} cannot be read ({error.strerror})") from None
        if len(lines) != len(held_out.references):
            sizes = f"has {counted(len(lines), 'line')}, the held-out set {len(held_out.references)}"
            remedy = "line N must be the translation of source sentence N"
            raise UserError(f"systems={system}: {path} {sizes}; {remedy}")
        entries[name] = Entry(name, lines)
    return list(entries.values())
