"""A model that learns its corpus and what others make of it: data diversification (Nguyen et al. 2020).

python scripts/diversify.py DIR [--models 1] [--jobs 2] [--student 'training.max_epochs=7'] experiment=... data=...

Trains models of both directions (DIR/forward/SEED, DIR/backward/SEED) and has them translate the training text. The
last model, DIR/student, learns the corpus, its sources with their translations and its targets with theirs; --student
are values for it alone. What each run printed lies beside it; DIR/comparison compares forward models and student on the
validation set. With the same DIR again, what has finished is not repeated and what was interrupted goes on.
"""

import argparse
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from ablation import command, printed, train
from omegaconf import OmegaConf
from tqdm import tqdm

from nmt.config import schema
from nmt.config.compose import typed_union
from nmt.config.errors import UserError
from nmt.data.corpus import splits
from nmt.files import lines_of, write_atomically

Pairs = list[tuple[str, str]]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("overrides", nargs="+", help="the recipe, as for nmt-train")
    parser.add_argument("--models", type=int, default=1, help="in each direction; seeds from 1 on")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; give threads=1 with them")
    parser.add_argument("--student", default="", metavar="OVERRIDES", help="for the last model alone")
    parser.add_argument("--search", default="search=beam search.beam_size=5", help="for the training text")
    options = parser.parse_intermixed_args()
    if options.models < 1 or options.jobs < 1:
        parser.error("--models and --jobs must be at least 1")
    try:
        return diversify(options)
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2


def diversify(options: argparse.Namespace) -> int:
    """All of it. Returns the exit status."""
    folder, data = options.directory, corpus_of(options.overrides)
    if data.kind == "demo":
        raise UserError("data=demo: has one direction only; give a corpus, such as data=files")
    languages = data.source_lang, data.target_lang
    pairs = [(source, target) for source, target, _ in splits(data)["train"] if source and target]
    save(pairs, folder / "text" / "train", languages)
    seeds = range(1, options.models + 1)
    directions = {"forward": options.overrides, "backward": [*options.overrides, *backwards(data)]}
    work = {
        folder / name / str(seed): [*values, f"seed={seed}"] for name, values in directions.items() for seed in seeds
    }

    def teach(run: Path) -> Pairs:
        """Returns the pairs that it makes."""
        finish(run, work[run])
        if run.parent.name == "forward":
            lines = translated(run, folder / "text" / f"train.{languages[0]}", options.search)
            return [(source, line) for (source, _), line in zip(pairs, lines, strict=True)]
        lines = translated(run, folder / "text" / f"train.{languages[1]}", options.search)
        return [(line, target) for (_, target), line in zip(pairs, lines, strict=True)]

    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(work) + 1, unit=" runs") as bar:
        made: Pairs = []
        for found in pool.map(teach, work):
            made += found
            bar.update()
        known = set(pairs)
        new = [pair for pair in dict.fromkeys(made) if all(pair) and pair not in known]
        save(new, folder / "translations" / "train", languages)
        bar.write(f"{len(new):,} new pairs beside {len(pairs):,}: {folder / 'translations'}")
        extra = ",".join([*data.extra, str(folder / "translations" / "train")])
        finish(folder / "student", [*options.overrides, f"data.extra=[{extra}]", *shlex.split(options.student)])
        bar.update()
    runs = f"runs=[{folder / 'forward'},{folder / 'student'}]"
    compare = [command("nmt-compare"), runs, "split=validation", f"output={folder / 'comparison'}"]
    return subprocess.run(compare, check=False).returncode


def finish(run: Path, overrides: list[str]) -> None:
    """Train, or what is left of it. Raises UserError if that fails."""
    if train(run, overrides):
        raise UserError(f"{run}: failed, see {printed(run)}")


def corpus_of(overrides: list[str]) -> schema.Data:
    """Raises UserError with what nmt-train says of the overrides."""
    words = [command("nmt-train"), "--cfg", "job", *overrides]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    if told.returncode:
        raise UserError(told.stderr.strip().removeprefix("nmt-train: error: "))
    values = OmegaConf.to_container(OmegaConf.create(told.stdout).data, resolve=True)
    data: schema.Data = typed_union(schema.Data, cast(dict[str, Any], values), "data")
    return data


def backwards(data: schema.Data) -> list[str]:
    """Overrides that exchange source and target."""
    values = data.model_dump()
    swaps = [("source_lang", "target_lang"), ("source_column", "target_column")]
    return [
        f"data.{key}={values[other]}"
        for one, two in swaps
        for key, other in ((one, two), (two, one))
        if values.get(other) is not None
    ]


def translated(run: Path, text: Path, search: str) -> list[str]:
    """The lines of a text in the run's other language, translated once."""
    path = run.with_suffix(".translations")
    if not path.exists():
        words = [command("nmt-translate"), f"run={run}", *shlex.split(search)]
        with text.open("rb") as given:
            done = subprocess.run(words, stdin=given, capture_output=True, check=False)
        if done.returncode:
            raise UserError(f"{run}: {done.stderr.decode().strip()}")
        write_atomically(path, done.stdout)
    return lines_of(path.read_bytes())


def save(pairs: Pairs, prefix: Path, languages: tuple[str, str]) -> None:
    """PREFIX.en and PREFIX.de, or whatever the languages are."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for side, language in enumerate(languages):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        write_atomically(prefix.with_name(f"{prefix.name}.{language}"), text.encode())


if __name__ == "__main__":
    sys.exit(main())
