"""A model that learns its corpus and what others make of it: data diversification (Nguyen et al. 2020).

python scripts/diversify.py DIR [--models 1] [--jobs 2] [--student 'training.max_epochs=7'] experiment=... data=...

Trains models of both directions (DIR/forward/SEED, DIR/backward/SEED) and has them translate the training text, by
beams of five. The last model, DIR/student, of the same size, learns the corpus, its sources with their translations and
its targets with theirs; --student are values for it alone. A second --student makes DIR/student-2, which also learns
what the first one makes of the sources, and so on. What each run printed lies beside it; DIR/comparison compares the
forward models and the students on the validation set. With the same DIR and values again, runs and translations that
are there are not made again, and a run that was interrupted goes on.
"""

import argparse
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import call, command, finish, several, split, told
from tqdm import tqdm

from nmt.cli.compose import preview, without_size
from nmt.config import schema
from nmt.config.compose import merge_search
from nmt.config.errors import UserError
from nmt.config.overrides import quoted
from nmt.data.corpus import splits
from nmt.files import decode_lines, to_json, write_atomically
from nmt.run import RunDirectory, read_json

Pairs = list[tuple[str, str]]
PIECE = 10_000  # lines translated at a time; what an interruption costs


def main() -> int:
    """Entry point."""
    parser = several(__doc__, 1, "in each direction")
    parser.add_argument("--student", action="append", metavar="'OVERRIDES'", help="for the last model alone")
    parser.add_argument("--search", help="for the training text: overrides; default: the recipe's, with beams of five")
    return call(diversify, parser)


def diversify(options: argparse.Namespace) -> int:
    """All of it. Returns the exit status."""
    folder, config = options.directory, preview("train", schema.TrainConfig, options.overrides)
    default = "search.beam_size=5" if config.search.kind == "beam" else ""
    search = split("--search", default if options.search is None else options.search)
    turned = [*options.overrides, *backwards(config)]
    # What is wrong with the student or the search is told now, not in some hours.
    students = [split("--student", words) for words in options.student or [""]]
    extras = [preview("train", schema.TrainConfig, [*turned, *own]).data.extra for own in students]
    merge_search(config.search, preview("translate", schema.TranslateConfig, ["run=DIR", *search]).search)
    pairs = [(source, target) for source, target, _ in splits(config.data)["train"] if source and target]
    begin(folder, {"overrides": options.overrides, "models": options.models, "search": search}, students)
    directions = {"forward": options.overrides, "backward": turned}
    work = {
        folder / name / str(seed): [*given, f"seed={seed}"]
        for name, given in directions.items()
        for seed in range(1, options.models + 1)
    }
    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(work) + len(students), unit=" runs") as bar:

        def onward(run: Path) -> Pairs:
            """The sources with what the run makes of them."""
            lines = translated(run, [source for source, _ in pairs], search, bar)
            return [(source, line) for (source, _), line in zip(pairs, lines, strict=True)]

        def teach(run: Path) -> Pairs:
            """Returns the pairs that it makes."""
            with told(pool, bar):
                finish(run, work[run])
                if run.parent.name == "forward":
                    return onward(run)
                lines = translated(run, [target for _, target in pairs], search, bar)
                return [(line, target) for (_, target), line in zip(pairs, lines, strict=True)]

        made: Pairs = []
        for found in pool.map(teach, work):
            made += found
            bar.update()
        known, last = set(pairs), None
        size = RunDirectory(folder / "forward" / "1").first_start()["choices"]["size"]
        given = [f"size={size}", *without_size(options.overrides)]
        for number, (own, more) in enumerate(zip(students, extras, strict=True), 1):
            made += onward(last) if last else []
            new = [pair for pair in dict.fromkeys(made) if all(pair) and pair not in known]
            text = folder / numbered("translations", number) / "train"
            save(new, text, (config.data.source_lang, config.data.target_lang))
            bar.write(f"{len(new):,} new pairs beside {len(pairs):,}: {text.parent}")
            extra = ",".join(map(quoted, [*more, text]))
            last = folder / numbered("student", number)
            # In a thread: where it is interrupted it is waited for, and saves.
            pool.submit(finish, last, [*given, *own, f"data.extra=[{extra}]"]).result()
            bar.update()
    names = ["forward", *(numbered("student", number) for number in range(1, len(students) + 1))]
    runs = f"runs=[{','.join(quoted(folder / name) for name in names)}]"
    compare = [command("nmt-compare"), runs, "split=validation", f"output={quoted(folder / 'comparison')}"]
    return subprocess.run(compare, check=False).returncode


def numbered(name: str, number: int) -> str:
    """The first has the name alone."""
    return name if number == 1 else f"{name}-{number}"


def begin(folder: Path, asked: dict[str, Any], students: list[list[str]]) -> None:
    """Raises UserError if something else was begun there: its translations would be taken for this one's."""
    path = folder / "diversify.json"
    before = read_json(path) or asked
    if {**before, "students": []} != {**asked, "students": []}:
        raise UserError(f"{folder}: was begun with other values ({path}); give another folder")
    known = before.get("students", [])
    runs = [folder / numbered("student", number) for number in range(1, len(known) + 1)]
    for number, run in enumerate(runs):
        if run.exists() and students[number : number + 1] in ([], [known[number]]):
            continue
        for other in (made for later in runs[number:] for made in (later, translations(later)) if made.exists()):
            was = f"the values {shlex.join(known[number])!r} and the students before it"
            raise UserError(f"{other}: is of another student, of {was}; move all {folder}/student* away")
    folder.mkdir(parents=True, exist_ok=True)
    asked["students"] = [*students, *known[len(students) :]]
    write_atomically(path, to_json(asked, indent=2).encode())


def backwards(config: schema.TrainConfig) -> list[str]:
    """Overrides that exchange source and target. Raises UserError where that cannot be."""
    data = config.data
    if data.kind == "demo":
        raise UserError("data=demo: has one direction only; give a corpus, such as data=files")
    if data.source_lang == data.target_lang:
        raise UserError(f"data.source_lang and data.target_lang are both {data.source_lang}: give them different names")
    if getattr(data, "alignments", None) is not None:
        raise UserError("data.alignments: would be those of one direction only; leave it out")
    swaps = [("data", "source_lang", "target_lang"), ("data", "source_column", "target_column")]
    if getattr(config.tokenizer, "target_model", None) is not None:
        swaps.append(("tokenizer", "source_model", "target_model"))
    found = []
    for section, one, two in swaps:
        for key, other in ((one, two), (two, one)):
            value = getattr(getattr(config, section), other)
            found.append(f"{section}.{key}={'null' if value is None else quoted(value)}")
    return found


def translated(run: Path, text: list[str], search: list[str], bar: Any) -> list[str]:  # noqa: ANN401
    """The lines in the run's other language, translated once; interrupted, the pieces that are there stay."""
    path = translations(run)
    starts = range(0, len(text), PIECE)
    pieces = [path.with_suffix(f".translations-{start + 1}") for start in starts]
    if not path.exists():
        for piece, start in zip(pieces, starts, strict=True):
            if not piece.exists():
                words = [command("nmt-translate"), f"run={quoted(run)}", *search]
                given = "".join(f"{line}\n" for line in text[start : start + PIECE]).encode()
                done = subprocess.run(words, input=given, capture_output=True, check=False)
                if done.returncode:
                    raise UserError(f"{run}: {done.stderr.decode().strip()}")
                write_atomically(piece, done.stdout)
                bar.write(f"{run}: {min(start + PIECE, len(text)):,} of {len(text):,} lines translated")
        write_atomically(path, b"".join(piece.read_bytes() for piece in pieces))
    for piece in pieces:
        piece.unlink(missing_ok=True)
    return decode_lines(path.read_bytes())


def translations(run: Path) -> Path:
    """What the run made of the training text."""
    return run.with_suffix(".translations")


def save(pairs: Pairs, prefix: Path, languages: tuple[str, str]) -> None:
    """PREFIX.en and PREFIX.de, or whatever the languages are."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for side, language in enumerate(languages):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        write_atomically(prefix.with_name(f"{prefix.name}.{language}"), text.encode())


if __name__ == "__main__":
    sys.exit(main())
