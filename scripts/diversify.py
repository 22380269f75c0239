"""Data diversification (Nguyen et al. 2020): train a model on its corpus and on other models' translations of it.

python scripts/diversify.py DIR [--models 1] [--jobs 2] [--student 'training.max_epochs=7'] experiment=... data=...

Trains models of both directions, DIR/forward/SEED and DIR/backward/SEED, which translate the training text by beam
search with five hypotheses. Then trains the student, DIR/student, on the corpus, the sources with their translations
and the targets with theirs; --student holds overrides for it. Each further --student adds a student, DIR/student-2
and so on, that also learns from the translations of the student before it. The output of a run is in the .txt file
beside it. DIR/comparison compares the forward models and the students on the validation set. Started again with the
same arguments, the script skips finished runs and translations and resumes interrupted ones.
"""

import argparse
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import command, compare, finish, reporting_failure, run_parser, run_script, split_overrides
from tqdm import tqdm

from nmt.cli.compose import compose, without_size
from nmt.config import schema
from nmt.config.errors import UserError, quoted
from nmt.data.corpus import splits
from nmt.system.files import decode_lines, to_json, write_atomically
from nmt.system.run import RunDirectory, read_json
from nmt.translate.search import merge_search

Pairs = list[tuple[str, str]]
PIECE = 10_000  # lines that are translated and saved at a time; an interruption loses the current piece


def main() -> int:
    parser = run_parser(__doc__, 1, "models in each direction")
    parser.add_argument("--student", action="append", metavar="'OVERRIDES'", help="for the student alone")
    parser.add_argument("--search", help="overrides for translating the training text; default: the recipe's, beam 5")
    return run_script(diversify, parser)


def diversify(options: argparse.Namespace) -> int:
    """Train the models, translate, train the students, compare. Returns the exit status."""
    folder, config = options.directory, compose("train", schema.TrainConfig, options.overrides)
    default = "search.beam_size=5" if config.search.kind == "beam" else ""
    search = split_overrides("--search", default if options.search is None else options.search)
    reverse = [*options.overrides, *backwards(config)]
    # Check the students and the search now, not after hours of training.
    students = [split_overrides("--student", text) for text in options.student or [""]]
    extras = [compose("train", schema.TrainConfig, [*reverse, *own]).data.extra for own in students]
    merge_search(config.search, compose("translate", schema.TranslateConfig, ["run=DIR", *search]).search)
    train = (pair for source in splits(config.data)["train"] for pair in source)
    pairs = [(pair.source, pair.target) for pair in train if pair.source and pair.target]
    begin(folder, {"overrides": options.overrides, "models": options.models, "search": search}, students)
    overrides = {
        folder / name / str(seed): [*direction, f"seed={seed}"]
        for name, direction in {"forward": options.overrides, "backward": reverse}.items()
        for seed in range(1, options.models + 1)
    }
    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(overrides) + len(students), unit=" runs") as bar:
        failures: list[UserError] = []

        def forward(run: Path) -> Pairs:
            """Return pairs of a source and the run's translation."""
            lines = translated(run, [source for source, _ in pairs], search, bar)
            return [(source, line) for (source, _), line in zip(pairs, lines, strict=True)]

        def train_and_translate(run: Path) -> Pairs:
            """Train a model of either direction, and return the sentence pairs that it generates."""
            with reporting_failure(failures, bar):
                finish(run, overrides[run])
                if run.parent.name == "forward":
                    return forward(run)
                lines = translated(run, [target for _, target in pairs], search, bar)
                return [(line, target) for (_, target), line in zip(pairs, lines, strict=True)]

        generated: Pairs = []
        for result in pool.map(train_and_translate, overrides):
            generated += result
            bar.update()
        known, student = set(pairs), None
        size = RunDirectory(folder / "forward" / "1").first_start()["choices"]["size"]
        recipe = [f"size={size}", *without_size(options.overrides)]
        for number, (own, extra) in enumerate(zip(students, extras, strict=True), 1):
            generated += forward(student) if student else []
            new = [pair for pair in dict.fromkeys(generated) if all(pair) and pair not in known]
            text = folder / numbered("translations", number) / "train"
            save(new, text, (config.data.source_lang, config.data.target_lang))
            bar.write(f"{len(new):,} new pairs beside {len(pairs):,}: {text.parent}")
            student = folder / numbered("student", number)
            # Train in a thread of the pool: at Ctrl-C the pool waits for the run, which then saves its checkpoint.
            data = f"data.extra=[{','.join(map(quoted, [*extra, text]))}]"
            pool.submit(finish, student, [*recipe, *own, data]).result()
            bar.update()
    names = ["forward", *(numbered("student", number) for number in range(1, len(students) + 1))]
    return compare([folder / name for name in names], folder / "comparison")


def numbered(name: str, number: int) -> str:
    """Return NAME for number 1, and then NAME-2, NAME-3, ..."""
    return name if number == 1 else f"{name}-{number}"


def begin(folder: Path, settings: dict[str, Any], students: list[list[str]]) -> None:
    """Record the settings in the folder. Raises UserError if it holds runs or translations with other settings."""
    path = folder / "diversify.json"
    saved = read_json(path) or settings
    if {**saved, "students": []} != {**settings, "students": []}:
        raise UserError(f"{folder}: was started with other values ({path}); give another folder")
    known = saved.get("students", [])
    runs = [folder / numbered("student", number) for number in range(1, len(known) + 1)]
    for number, run in enumerate(runs):
        if run.exists() and students[number : number + 1] in ([], [known[number]]):
            continue
        for other in (path for later in runs[number:] for path in (later, translations(later)) if path.exists()):
            values = f"the values {shlex.join(known[number])!r} and the students before it"
            raise UserError(f"{other}: is of another student, of {values}; move all {folder}/student* away")
    folder.mkdir(parents=True, exist_ok=True)
    settings["students"] = [*students, *known[len(students) :]]
    write_atomically(path, to_json(settings, indent=2).encode())


def backwards(config: schema.TrainConfig) -> list[str]:
    """Return the overrides that exchange source and target. Raises UserError if the corpus has one direction only."""
    data = config.data
    if data.kind == "demo":
        raise UserError("data=demo: has one direction only; give a corpus, such as data=files")
    if data.kind == "multilingual":
        raise UserError("data=multilingual: has several directions; give one, such as data=files")
    if getattr(data, "alignments", None) is not None:
        raise UserError("data.alignments: would be for one direction only; leave it out")
    swaps = [("data", "source_lang", "target_lang"), ("data", "source_column", "target_column")]
    if getattr(config.tokenizer, "target_model", None) is not None:
        swaps.append(("tokenizer", "source_model", "target_model"))
    overrides = []
    for section, one, two in swaps:
        for key, other in ((one, two), (two, one)):
            value = getattr(getattr(config, section), other)
            overrides.append(f"{section}.{key}={'null' if value is None else quoted(value)}")
    if config.tokenizer.kind == "sides":
        for side, other in (("source", config.tokenizer.target), ("target", config.tokenizer.source)):
            overrides += [f"tokenizer.{side}.{key}={to_json(value)}" for key, value in other.model_dump().items()]
    return overrides


def translated(run: Path, text: list[str], search: list[str], bar: Any) -> list[str]:  # noqa: ANN401
    """Translate lines by the run and save the translations; after an interruption, continue with the next piece."""
    path = translations(run)
    starts = range(0, len(text), PIECE)
    pieces = [path.with_suffix(f".translations-{start + 1}") for start in starts]
    if not path.exists():
        for piece, start in zip(pieces, starts, strict=True):
            if not piece.exists():
                words = [command("nmt-translate"), f"run={quoted(run)}", *search]
                lines = "".join(f"{line}\n" for line in text[start : start + PIECE]).encode()
                result = subprocess.run(words, input=lines, capture_output=True, check=False)
                if result.returncode:
                    raise UserError(f"{run}: {result.stderr.decode().strip()}")
                write_atomically(piece, result.stdout)
                bar.write(f"{run}: {min(start + PIECE, len(text)):,} of {len(text):,} lines translated")
        write_atomically(path, b"".join(piece.read_bytes() for piece in pieces))
    for piece in pieces:
        piece.unlink(missing_ok=True)
    return decode_lines(path.read_bytes())


def translations(run: Path) -> Path:
    """Return the file of the run's translations of the training text."""
    return run.with_suffix(".translations")


def save(pairs: Pairs, prefix: Path, languages: tuple[str, str]) -> None:
    """Write PREFIX.LANGUAGE for both languages."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for side, language in enumerate(languages):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        write_atomically(prefix.with_name(f"{prefix.name}.{language}"), text.encode())


if __name__ == "__main__":
    sys.exit(main())
