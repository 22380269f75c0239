"""Read the outputs to compare, of runs and of other systems, with their test set and the training of each run."""

import glob
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmt.config import schema
from nmt.config.compose import validated
from nmt.config.errors import UserError, printable
from nmt.config.overrides import for_shell, user_path
from nmt.data.reading.text import open_text, user_lines
from nmt.data.word_alignment import alignment_error_rate, parse_pharaoh
from nmt.evaluate.bleu import SUFFIX, Counted, ScoreSettings, count, stored_counts
from nmt.evaluate.evaluation import score_settings
from nmt.explain.faithfulness import read_figures
from nmt.system.archive import is_archive
from nmt.system.files import read_bytes
from nmt.system.run import ERROR, EVALUATION, RunDirectory, digest, read_json, runs_below, text_lines
from nmt.system.saved_config import load_values

log = logging.getLogger(__name__)
MIN_MEASURE, MAX_MEASURE = 1e-9, 1e15  # limits of a measure other than 0: ratios and sums of such numbers are finite
TRAINING = ("seconds", "epochs", "target_tokens_per_second")


@dataclass(frozen=True)
class HeldOut:
    """A test set: what an output is scored against."""

    sources: list[str]
    references: list[str]
    settings: ScoreSettings

    def difference(self, other: "HeldOut") -> str | None:
        """Why scores on the two are not comparable; None if they are."""
        for side in ("sources", "references"):
            mine, others = getattr(self, side), getattr(other, side)
            if len(mine) != len(others):
                return f"the test set has {len(mine)} {side} in the first, {len(others)} in the second"
            for number, (line, other_line) in enumerate(zip(mine, others, strict=True), 1):
                if line != other_line:
                    return (
                        f"the test sets differ: line {number} of the {side} is {line!r} in the first, "
                        f"{other_line!r} in the second"
                    )
        if self.settings != other.settings:
            return f"BLEU is computed differently: {self.settings} in the first, {other.settings} in the second"
        return None


@dataclass(frozen=True)
class Entry:
    """One output. A system known only by its output has None or empty values for the rest."""

    name: str  # the run's directory, or the system's name
    hypotheses: list[str]
    seed: int | None = None
    config: str = ""  # equal for runs that differ only in seed, machine and the location of the same data
    choices: Mapping[str, Any] = field(default_factory=dict)  # groups and keys set by the user
    aer: float | None = None  # percent
    parameters: int | None = None
    training: Mapping[str, float] = field(default_factory=dict)  # TRAINING
    sentences_per_second: float | None = None
    curve: Sequence[tuple[float, float]] = ()  # epoch, validation BLEU
    word_weights: Path | None = None
    statistics: Path | None = None  # the file of its sentence statistics, if they are kept
    explained: Mapping[str, Any] = field(default_factory=dict)  # figures of nmt.compare.faithfulness

    @property
    def epoch_seconds(self) -> float | None:
        """Seconds of training per epoch."""
        seconds, epochs = self.training.get("seconds"), self.training.get("epochs")
        return seconds / epochs if seconds and epochs else None


@dataclass(frozen=True)
class System:
    """The runs of one configuration, which differ only in their seed."""

    name: str
    entries: list[Entry]

    def of_seed(self, seed: int | None) -> Entry:
        """The entry with this seed, else the first."""
        return next((entry for entry in self.entries if entry.seed == seed), self.entries[0])


def find_runs(names: Sequence[str]) -> dict[Path, bool]:
    """Runs and archives from paths, folders that hold runs (such as a sweep's) and patterns: each once, in order.

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
    """A finished run's output. Raises UserError if it has no translations of the split, or a damaged file."""
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
    fields, settings, command = _of_evaluation(run) if (path / EVALUATION).is_file() else _of_run(run)
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


def _of_run(run: RunDirectory) -> tuple[dict[str, Any], ScoreSettings, str]:
    """Fields of a run's Entry, how it is scored, and the command that translates again."""
    values, manifest = load_values(run.config), run.read_manifest()
    try:  # only what is needed, so that runs of other versions can be read
        seed, language = _number(values["seed"]), _target_lang(values["data"])
        evaluation = validated(schema.Evaluation, values["evaluation"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{run.config}: is not the configuration of a run ({error} is missing)") from None
    training = manifest.get("training", {})
    fields = {
        "seed": seed,
        "config": run.system_digest(),
        "choices": run.recorded_choices(),
        "parameters": _measure(manifest.get("parameters")),
        "training": {key: float(training[key]) for key in TRAINING if _measure(training.get(key))},
        "curve": _curve(run.metrics),
    }
    own = score_settings(evaluation, language)
    settings = ScoreSettings(own.tokenize, own.lowercase)  # of all directions together
    return fields, settings, f"nmt-evaluate {for_shell('run', run.source)}"


def _target_lang(data: Mapping[str, Any]) -> str:
    """All target languages, as in schema.MultilingualData."""
    corpora = data.get("corpora") or [data]
    return ",".join(dict.fromkeys(corpus["target_lang"] for corpus in corpora))


def _of_evaluation(folder: RunDirectory) -> tuple[dict[str, Any], ScoreSettings, str]:
    """The same for an evaluation in its own folder, such as an ensemble's."""
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


def _curve(path: Path) -> list[tuple[float, float]]:
    """(epoch, BLEU) of each validation."""
    records = []
    for line in text_lines(path) if path.is_file() else []:
        with suppress(ValueError):  # a line cut short by a kill
            records.append(json.loads(line))
    validations = [record for record in records if "validation/bleu" in record]
    return [(float(_measure(record["epoch"])), float(_measure(record["validation/bleu"]))) for record in validations]


def _number(value: Any) -> Any:  # noqa: ANN401
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise TypeError(f"{value!r} is not a number")
    return value


def _measure(value: Any) -> Any:  # noqa: ANN401
    """A duration, rate or count in the range of sensible values, or None."""
    if _number(value) is not None and value and not MIN_MEASURE <= value <= MAX_MEASURE:
        raise ValueError(f"{value!r} is out of range")
    return value


def count_sentences(entry: Entry, held_out: HeldOut) -> Counted:
    """The sentence statistics of an output, from the file beside it if that belongs to it."""
    texts = entry.hypotheses, held_out.references, held_out.settings
    return count(*texts) if entry.statistics is None else stored_counts(entry.statistics, *texts)


def read_systems(systems: Sequence[str], held_out: HeldOut) -> list[Entry]:
    """Outputs of other systems, each NAME=FILE. Raises UserError naming the file and what is wrong."""
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
