"""What is compared: a system's output on a test set, with what is known of how it came about."""

import glob
import json
import logging
import math
import os
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmt.config import schema
from nmt.config.compose import load_values, typed
from nmt.config.errors import UserError, printable
from nmt.config.overrides import for_shell, user_path
from nmt.evaluation import score_settings
from nmt.files import decode_lines, read_bytes, read_lines
from nmt.metrics.alignment import alignment_error_rate, parse_pharaoh
from nmt.metrics.bleu import ScoreSettings
from nmt.run import ERROR, EVALUATION, RunDirectory, digest, read_json, runs_below

log = logging.getLogger(__name__)
LEAST, LARGEST = 1e-9, 1e15  # of a measure that is not 0: ratios and sums of such numbers are finite
TRAINING = ("seconds", "epochs", "target_tokens_per_second")


@dataclass(frozen=True)
class HeldOut:
    """What an output is scored against."""

    sources: list[str]
    references: list[str]
    settings: ScoreSettings

    def difference(self, other: "HeldOut") -> str | None:
        """Why scores on the two do not compare; None if they do."""
        for what in ("sources", "references"):
            mine, others = getattr(self, what), getattr(other, what)
            if len(mine) != len(others):
                return f"the test set has {len(mine)} {what} in the first, {len(others)} in the second"
            for number, pair in enumerate(zip(mine, others, strict=True), 1):
                if pair[0] != pair[1]:
                    return (
                        f"the test sets differ: line {number} of the {what} is {pair[0]!r} in the first, "
                        f"{pair[1]!r} in the second"
                    )
        if self.settings != other.settings:
            return f"BLEU is taken in two ways: {self.settings} in the first, {other.settings} in the second"
        return None


@dataclass(frozen=True)
class Entry:
    """One output. What a system known only by its output has not got is None or empty."""

    name: str  # the run's directory, or the name that was given
    hypotheses: list[str]
    seed: int | None = None
    config: str = ""  # equal for runs that differ only in seed, machine, and where the same data lies
    asked: Mapping[str, Any] = field(default_factory=dict)
    aer: float | None = None  # percent
    parameters: int | None = None
    training: Mapping[str, float] = field(default_factory=dict)  # TRAINING
    sentences_per_second: float | None = None
    curve: Sequence[tuple[float, float]] = ()  # epoch, validation BLEU
    word_weights: Path | None = None


def find_runs(given: Sequence[str]) -> dict[Path, bool]:
    """Run directories from names, folders that hold runs (such as a sweep's) and patterns, each once, in order; True
    for one that was itself named. Raises UserError for what leads to none."""
    found: dict[Path, bool] = {}
    seen: dict[Path, Path] = {}  # another way may lead to the same run
    for name in given:
        place = user_path(name)
        places = [place] if place.exists() else [Path(path) for path in sorted(glob.glob(str(place), recursive=True))]
        runs = [path for each in places for path in _runs_at(each)]
        for failed in (path for each in places for path in each.rglob(ERROR)):
            if not (failed.parent / "config.yaml").is_file():
                RunDirectory(failed.parent).check_contained()
                error = read_bytes(failed).decode(errors="replace").partition("\n")[0]
                log.warning("left out: %s: failed (%s)", failed.parent, error)
        if not runs:
            if places:
                raise UserError(f"runs={name}: is neither a run nor a folder that holds runs")
            raise UserError(f"runs={name}: no such run, and no pattern that fits one")
        for run in runs:
            first = seen.setdefault(run.resolve(), run)
            found[first] = found.get(first, False) or run == place
    return found


def _runs_at(place: Path) -> list[Path]:
    if (place / "config.yaml").is_file():
        return [place]
    return sorted([*runs_below(place), *(path.parent for path in place.rglob(EVALUATION))]) if place.is_dir() else []


def read_run(path: Path, split: str) -> tuple[Entry, HeldOut]:
    """A finished run. Raises UserError if it has no translations of the split, or if a file of it is damaged."""
    try:
        return _read_run(path, split)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path}: a file of this run is damaged ({type(error).__name__}: {error})") from None


def _read_run(path: Path, split: str) -> tuple[Entry, HeldOut]:
    run = RunDirectory(path)
    run.check_contained()
    sources, references, gold = run.held_out(split)
    known, settings, again = _of_evaluation(run) if (path / EVALUATION).is_file() else _of_run(run)
    results = read_json(run.results).get(split)
    output = run.hypotheses / f"{split}.txt"
    if results is None or not output.is_file():
        raise UserError(f"{path}: has no {split} results; run {again} split={split}")
    hypotheses = _lines(output)
    if len(hypotheses) != len(references):
        raise UserError(
            f"{output}: has {len(hypotheses)} lines for {len(references)} sentences; run {again} split={split}"
        )
    words = run.alignments / f"{split}.words.jsonl"
    entry = Entry(
        name=printable(os.path.relpath(path)),
        hypotheses=hypotheses,
        aer=_aer(run, split, gold),
        sentences_per_second=_measure(results.get("sentences_per_second")),
        word_weights=words if words.is_file() else None,
        **known,
    )
    return entry, HeldOut(sources, references, settings)


def _of_run(run: RunDirectory) -> tuple[dict[str, Any], ScoreSettings, str]:
    """What is known of a run beside its output, how it is scored, and the command that translates again."""
    values, manifest = load_values(run.config), run.read_manifest()
    try:  # no more than is needed, so that runs of other versions can be read
        seed, language = _number(values["seed"]), values["data"]["target_lang"]
        evaluation = typed(schema.Evaluation, values["evaluation"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{run.config}: is not the configuration of a run ({error} is missing)") from None
    training = manifest.get("training", {})
    known = {
        "seed": seed,
        "config": run.system(),
        "asked": run.recorded_choices(),
        "parameters": _measure(manifest.get("parameters")),
        "training": {key: float(training[key]) for key in TRAINING if _measure(training.get(key))},
        "curve": _curve(run.metrics),
    }
    return known, score_settings(evaluation, language), f"nmt-evaluate {for_shell('run', run.path)}"


def _of_evaluation(folder: RunDirectory) -> tuple[dict[str, Any], ScoreSettings, str]:
    """The same of an evaluation in a folder of its own, above all of an ensemble."""
    about = read_json(folder.path / EVALUATION)
    known = {
        "config": digest(about),
        "asked": dict(about["asked"]),
        "parameters": _measure(about["parameters"]),
    }
    again = f"nmt-evaluate {for_shell('run', about['members'])} {for_shell('output', folder.path)}"
    return known, score_settings(schema.Evaluation(**about["evaluation"]), ""), again


def _aer(run: RunDirectory, split: str, gold: list[str] | None) -> float | None:
    path = run.alignments / f"{split}.references.pharaoh"
    if gold is None or not path.is_file():
        return None
    links = [parse_pharaoh(line)[0] for line in _lines(path)]
    return 100 * alignment_error_rate(links, [parse_pharaoh(line) for line in gold]).aer


def _curve(path: Path) -> list[tuple[float, float]]:
    if not path.is_file():
        return []
    lines = []
    for text in _lines(path):
        with suppress(ValueError):  # a line that a kill cut short
            lines.append(json.loads(text))
    validations = [line for line in lines if "validation/bleu" in line]
    return [(float(_measure(line["epoch"])), float(_measure(line["validation/bleu"]))) for line in validations]


def _lines(path: Path) -> list[str]:
    try:
        return read_lines(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid UTF-8 (at byte {error.start})") from None


def _number(value: Any) -> Any:  # noqa: ANN401
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise TypeError(f"{value!r} is no number")
    return value


def _measure(value: Any) -> Any:  # noqa: ANN401
    """A number that can be a duration, a rate or a count, None where there is none."""
    if _number(value) is not None and value and not LEAST <= value <= LARGEST:
        raise ValueError(f"{value!r} is out of range")
    return value


def read_systems(given: Sequence[str], held_out: HeldOut) -> list[Entry]:
    """Outputs of other systems, from NAME=FILE. Raises UserError naming the file and what is wrong."""
    entries: dict[str, Entry] = {}
    for system in given:
        name, _, place = system.partition("=")
        if not name or not place:
            raise UserError(f"systems={system}: expected NAME=FILE, a name and a file of translations")
        if name in entries:
            raise UserError(f"systems={system}: there are two systems named {name}")
        path = user_path(place)
        try:
            content = path.read_bytes()  # once: it may be a pipe
            lines = [line.removesuffix("\r") for line in decode_lines(content.removeprefix(BOM_UTF8))]
        except OSError as error:
            raise UserError(f"systems={system}: {path} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise UserError(f"systems={system}: {path}, line {line}: not valid UTF-8") from None
        if len(lines) != len(held_out.references):
            raise UserError(
                f"systems={system}: {path} has {len(lines)} lines, the test set {len(held_out.references)}; "
                "line N must be the translation of source sentence N"
            )
        entries[name] = Entry(name, lines)
    return list(entries.values())
