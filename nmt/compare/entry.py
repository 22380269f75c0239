"""Read the outputs to compare, of runs and of other systems, with their test set and the training of each run."""

import glob
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from nmt.config import schema
from nmt.config.compose import validated
from nmt.config.errors import UserError, for_shell, printable, user_path
from nmt.data.text import open_text, user_lines
from nmt.data.word_alignment import alignment_error_rate, parse_pharaoh
from nmt.evaluate.bleu import SUFFIX, Counted, ScoreSettings, count, stored_counts
from nmt.evaluate.evaluation import score_settings
from nmt.explain.faithfulness import read_figures
from nmt.system.files import is_archive, read_bytes
from nmt.system.run import ERROR, EVALUATION, RunDirectory, digest, load_values, read_json, runs_below, text_lines

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """A test set with the settings of its scores."""

    sources: list[str]
    references: list[str]
    settings: ScoreSettings

    def difference(self, other: "HeldOut") -> str | None:
        """Say why scores on the two are not comparable; None if they are."""
        for side in ("sources", "references"):
            lines, other_lines = getattr(self, side), getattr(other, side)
            if len(lines) != len(other_lines):
                return f"the test set has {len(lines)} {side} in the first, {len(other_lines)} in the second"
            for number, (line, other_line) in enumerate(zip(lines, other_lines, strict=True), 1):
                if line != other_line:
                    return (
                        f"the test sets differ: line {number} of the {side} is {line!r} in the first, "
                        f"{other_line!r} in the second"
                    )
        if self.settings != other.settings:
            return f"BLEU is computed differently: {self.settings} in the first, {other.settings} in the second"
        return None


class Validation(NamedTuple):
    """One validation during training."""

    updates: int
    epoch: float
    bleu: float
    perplexity: float | None


@dataclass(frozen=True)
class Training:
    """What a run's manifest and metrics.jsonl say of its training; None where they say nothing."""

    seconds: float | None = None  # of updates, without validations
    updates: int | None = None
    update_seconds: float | None = None
    tokens_per_second: float | None = None  # target tokens, the mean over all updates
    perplexity: float | None = None  # of the best checkpoint on the validation set
    machine: str = ""
    curve: Sequence[Validation] = ()

    @classmethod
    def read(cls, manifest: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> "Training":
        """Read the manifest and the records of metrics.jsonl. Raises ValueError, TypeError or KeyError for nonsense.

        The seconds of an update are the target tokens of a mean update, divided by the median speed of the logged
        windows: other work on the machine for a while does not change them.
        """
        training = manifest.get("training", {})
        seconds, updates, tokens, rate, best = (
            _measure(training.get(key))
            for key in ("seconds", "steps", "target_tokens", "target_tokens_per_second", "best_step")
        )
        rates = [
            _measure(record["train/tokens_per_second"]) for record in metrics if record.get("train/tokens_per_second")
        ]
        curve = [
            Validation(
                int(_measure(record["step"])),
                float(_measure(record["epoch"])),
                float(_measure(record["validation/bleu"])),
                _measure(record.get("validation/perplexity")),
            )
            for record in metrics
            if "validation/bleu" in record
        ]
        return cls(
            seconds=seconds or None,
            updates=updates or None,
            update_seconds=tokens / updates / median(rates) if tokens and updates and rates else None,
            tokens_per_second=rate or None,
            perplexity=next((point.perplexity for point in reversed(curve) if point.updates == best), None),
            machine=_machine(manifest),
            curve=curve,
        )

    @property
    def cost(self) -> float | None:
        """The seconds that all updates take at the usual speed of this machine."""
        return self.updates * self.update_seconds if self.updates and self.update_seconds else None


@dataclass(frozen=True)
class Entry:
    """One output. A system known only by its output has None or empty values for the rest."""

    name: str  # the run's directory, or the system's name
    hypotheses: Sequence[str]
    seed: int | None = None
    config: str = ""  # equal for runs that differ only in seed, machine and the location of the same data
    choices: Mapping[str, Any] = field(default_factory=dict)  # groups and keys set by the user
    aer: float | None = None  # percent
    parameters: int | None = None
    training: Training = field(default_factory=Training)
    sentences_per_second: float | None = None
    word_weights: Path | None = None
    statistics: Path | None = None  # file of its sentence statistics
    counted: Counted | None = None  # its sentence statistics, if they are known without the file
    explained: Mapping[str, Any] = field(default_factory=dict)  # figures of nmt.explain.faithfulness


@dataclass(frozen=True)
class System:
    """The runs of one configuration, which differ only in their seed."""

    name: str
    entries: list[Entry]

    def of_seed(self, seed: int | None) -> Entry:
        """Return the entry with this seed, else the first."""
        return next((entry for entry in self.entries if entry.seed == seed), self.entries[0])


def find_runs(names: Sequence[str]) -> dict[Path, bool]:
    """Find runs and archives by paths, folders that hold runs (such as a sweep's) and patterns: each once, in order.

    The value is True if a name is the run's own path, not a folder's. Raises UserError for a name without any run.
    """
    runs: dict[Path, bool] = {}
    first: dict[Path, Path] = {}  # by resolved path: several names may lead to one run
    for name in names:
        named = user_path(name)
        paths = [named] if named.exists() else [Path(path) for path in sorted(glob.glob(str(named), recursive=True))]
        for failed in (error.parent for path in paths for error in path.rglob(ERROR)):
            if not (failed / "config.yaml").is_file():
                RunDirectory(failed).check_contained()
                message = read_bytes(failed / ERROR).decode(errors="replace").partition("\n")[0]
                log.warning("left out: %s: failed (%s)", failed, message)
        below = [run for path in paths for run in _runs_at(path)]
        if not below:
            reason = "is neither a run nor a folder that holds runs" if paths else "no run or pattern matches"
            raise UserError(f"runs={name}: {reason}")
        for run in below:
            path = first.setdefault(run.resolve(), run)
            runs[path] = runs.get(path, False) or run == named
    return runs


def _runs_at(path: Path) -> list[Path]:
    if (path / "config.yaml").is_file() or is_archive(path):
        return [path]
    return sorted([*runs_below(path), *(file.parent for file in path.rglob(EVALUATION))]) if path.is_dir() else []


def read_run(path: Path, split: str) -> tuple[Entry, HeldOut]:
    """Read the output of a finished run. Raises UserError for a run without the split's translations, or damaged."""
    try:
        return _read_run(path, split)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path}: a file of this run is damaged ({type(error).__name__}: {error})") from None


def _read_run(path: Path, split: str) -> tuple[Entry, HeldOut]:
    if path.is_file():
        run = RunDirectory.existing(path, "runs")
    else:
        run = RunDirectory(path)
        run.check_contained()
    sources, references, gold = run.held_out(split)
    fields, settings, command = (_read_evaluation if (path / EVALUATION).is_file() else _read_training)(run)
    results = read_json(run.results).get(split)
    output = run.hypotheses / f"{split}.txt"
    if results is None or not output.is_file():
        raise UserError(f"{path}: has no {split} results; run {command} split={split}")
    hypotheses = text_lines(output)
    if len(hypotheses) != len(references):
        raise UserError(
            f"{output}: has {len(hypotheses)} lines for {len(references)} sentences; run {command} split={split}"
        )
    words = run.alignments / f"{split}.words.jsonl"
    entry = Entry(
        name=printable(os.path.relpath(path)),
        hypotheses=hypotheses,
        aer=_aer(run, split, gold),
        sentences_per_second=_measure(results.get("sentences_per_second")),
        word_weights=words if words.is_file() else None,
        statistics=None if run.is_archive else run.hypotheses / f"{split}{SUFFIX}",
        explained=read_figures(results.get("faithfulness")),
        **fields,
    )
    return entry, HeldOut(sources, references, settings)


def _read_training(run: RunDirectory) -> tuple[dict[str, Any], ScoreSettings, str]:
    """Read a run's fields of Entry, the settings of its scores, and the command that evaluates it again."""
    values, manifest = load_values(run.config), run.read_manifest()
    try:  # only what is needed, so that runs of other versions can be read
        seed, settings = values["seed"], read_settings(values)
    except (KeyError, TypeError) as error:
        raise UserError(f"{run.config}: is not the configuration of a run ({error} is missing)") from None
    fields = {
        "seed": seed,
        "config": run.system_digest(),
        "choices": run.recorded_choices(),
        "parameters": _measure(manifest.get("parameters")),
        "training": Training.read(manifest, read_metrics(run.metrics)),
    }
    return fields, settings, f"nmt-evaluate {for_shell('run', run.source)}"


def read_settings(values: Mapping[str, Any]) -> ScoreSettings:
    """Read how a run with this configuration is scored, all target languages together. Raises KeyError or TypeError."""
    data = values["data"]
    languages = ",".join(dict.fromkeys(corpus["target_lang"] for corpus in data.get("corpora") or [data]))
    settings = score_settings(validated(schema.Evaluation, values["evaluation"]), languages)
    return ScoreSettings(settings.tokenize, settings.lowercase)


def _read_evaluation(folder: RunDirectory) -> tuple[dict[str, Any], ScoreSettings, str]:
    """Read the same from the folder of an evaluation, such as an ensemble's."""
    values = read_json(folder.path / EVALUATION)
    fields = {
        "config": digest(values),
        "choices": dict(values["asked"]),
        "parameters": _measure(values["parameters"]),
    }
    command = f"nmt-evaluate {for_shell('run', values['members'])} {for_shell('output', folder.path)}"
    return fields, score_settings(schema.Evaluation(**values["evaluation"]), ""), command


def _aer(run: RunDirectory, split: str, gold: list[str] | None) -> float | None:
    path = run.alignments / f"{split}.references.pharaoh"
    if gold is None or not path.is_file():
        return None
    links = [parse_pharaoh(line)[0] for line in text_lines(path)]
    return 100 * alignment_error_rate(links, [parse_pharaoh(line) for line in gold]).aer


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of metrics.jsonl; a line that a kill cut short is left out."""
    records = []
    for line in text_lines(path) if path.is_file() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _machine(manifest: Mapping[str, Any]) -> str:
    """Describe the machine of the last start; empty if it is unknown."""
    machine = (manifest.get("starts") or [{}])[-1].get("machine", {})
    counts = [f"{key}={machine[key]}" for key in ("threads", "processes") if machine.get(key)]
    return printable(", ".join(map(str, (*(machine[key] for key in ("name", "precision") if key in machine), *counts))))


def _measure(value: Any) -> Any:  # noqa: ANN401
    """Check a duration, rate, score or count, or None. Raises ValueError if it is out of range."""
    if value is not None and not 0 <= value <= 1e15:  # noqa: PLR2004  # sums and products are finite
        raise ValueError(f"{value!r} is out of range")
    return value


def count_sentences(entry: Entry, held_out: HeldOut) -> Counted:
    """Count the sentence statistics of an output, or read them from the file beside it."""
    if entry.counted is not None:
        return entry.counted
    texts = entry.hypotheses, held_out.references, held_out.settings
    return count(*texts) if entry.statistics is None else stored_counts(entry.statistics, *texts)


def read_systems(systems: Sequence[str], held_out: HeldOut) -> list[Entry]:
    """Read outputs of other systems, each NAME=FILE. Raises UserError naming the file and what is wrong."""
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
            raise UserError(
                f"systems={system}: {path} has {len(lines)} lines, the test set {len(held_out.references)}; "
                "line N must be the translation of source sentence N"
            )
        entries[name] = Entry(name, lines)
    return list(entries.values())
