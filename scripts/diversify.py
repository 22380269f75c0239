"""A model that learns its corpus and what others make of it: data diversification (Nguyen et al. 2020).

python scripts/diversify.py DIR [--models 1] [--jobs 2] [--student 'training.max_epochs=7'] experiment=... data=...

Trains models of both directions (DIR/forward/SEED, DIR/backward/SEED) and has them translate the training text. The
last model, DIR/student, of the same size, learns the corpus, its sources with their translations and its targets with
theirs; --student are values for it alone. What each run printed lies beside it; DIR/comparison compares forward models
and student on the validation set. With the same DIR and values again, runs and translations that are there are not made
again, and a run that was interrupted goes on.
"""

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from ablation import command, printed, quoted, train
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from nmt.config import schema
from nmt.config.compose import typed_union
from nmt.config.errors import UserError
from nmt.data.corpus import splits
from nmt.files import lines_of, to_json, write_atomically

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
    except (UserError, OSError, OmegaConfBaseException) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130


def diversify(options: argparse.Namespace) -> int:
    """All of it. Returns the exit status."""
    folder, config = options.directory, composed(options.overrides)
    values = cast(dict[str, Any], OmegaConf.to_container(config.data, resolve=True))
    data: schema.Data = typed_union(schema.Data, values, "data")
    turned = [*options.overrides, *backwards(data, config)]
    composed([*turned, *shlex.split(options.student)])  # what is wrong with it is told now, not in some hours
    pairs = [(source, target) for source, target, _ in splits(data)["train"] if source and target]
    begin(folder, {name: getattr(options, name) for name in ("overrides", "models", "search", "student")})
    languages = data.source_lang, data.target_lang
    save(pairs, folder / "text" / "train", languages)
    directions = {"forward": options.overrides, "backward": turned}
    work = {
        folder / name / str(seed): [*given, f"seed={seed}"]
        for name, given in directions.items()
        for seed in range(1, options.models + 1)
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
        extra = ",".join(map(quoted, [*data.extra, folder / "translations" / "train"]))
        first = json.loads((folder / "forward" / "1" / "manifest.json").read_text())["starts"][0]
        given = [f"size={first['choices']['size']}", *options.overrides, *shlex.split(options.student)]
        finish(folder / "student", [*given, f"data.extra=[{extra}]"])
        bar.update()
    runs = f"runs=[{quoted(folder / 'forward')},{quoted(folder / 'student')}]"
    compare = [command("nmt-compare"), runs, "split=validation", f"output={quoted(folder / 'comparison')}"]
    return subprocess.run(compare, check=False).returncode


def begin(folder: Path, asked: dict[str, Any]) -> None:
    """Raises UserError if something else was begun there: its translations would be taken for this one's."""
    path = folder / "diversify.json"
    if path.exists() and json.loads(path.read_text()) != asked:
        raise UserError(f"{folder}: was begun with other values ({path}); give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json(asked, indent=2).encode())


def finish(run: Path, overrides: list[str]) -> None:
    """Train, or what is left of it. Raises UserError if that fails."""
    if train(run, overrides):
        raise UserError(f"{run}: failed, see {printed(run)}")


def composed(overrides: list[str]) -> DictConfig:
    """Raises UserError with what nmt-train says of the overrides."""
    words = [command("nmt-train"), "--cfg", "job", *overrides]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    if told.returncode:
        raise UserError(told.stderr.strip().removeprefix("nmt-train: error: "))
    return cast(DictConfig, OmegaConf.create(told.stdout))


def backwards(data: schema.Data, config: DictConfig) -> list[str]:
    """Overrides that exchange source and target. Raises UserError where that cannot be."""
    if data.kind == "demo":
        raise UserError("data=demo: has one direction only; give a corpus, such as data=files")
    if data.source_lang == data.target_lang:
        raise UserError(f"data.source_lang and data.target_lang are both {data.source_lang}: give them different names")
    if getattr(data, "alignments", None) is not None:
        raise UserError("data.alignments: would be those of one direction only; leave it out")
    swaps = {"data": [("source_lang", "target_lang"), ("source_column", "target_column")]}
    if config.tokenizer.get("target_model"):
        swaps["tokenizer"] = [("source_model", "target_model")]
    return [
        f"{section}.{key}={'null' if config[section][other] is None else quoted(config[section][other])}"
        for section, pairs in swaps.items()
        for one, two in pairs
        for key, other in ((one, two), (two, one))
    ]


def translated(run: Path, text: Path, search: str) -> list[str]:
    """The lines of a text in the run's other language, translated once."""
    path = run.with_suffix(".translations")
    if not path.exists():
        words = [command("nmt-translate"), f"run={quoted(run)}", *shlex.split(search)]
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
