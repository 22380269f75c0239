"""Ablation: train a recipe as it is and with each of a list of changes, and compare on the validation set.

python scripts/ablation.py DIR [--jobs 2] [--seeds 3] [--changes NAME,NAME] experiment=multi30k_en_de_best ...

Writes runs to DIR/NAME/SEED, their output to DIR/NAME/SEED.txt and the comparison to DIR/comparison. Started again with
the same DIR, it skips finished runs and resumes interrupted ones. Changes without effect on the recipe are left out.
Add your own change with --add 'wide=encoder.hidden=512 decoder.hidden=1024'.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import runs
from tqdm import tqdm

from nmt.cli.compose import compose
from nmt.config.schema import TrainConfig

RECIPE = "recipe"
CHANGES = {
    # Parts of the recipe that a change removes or reduces
    "no-label-smoothing": "training.label_smoothing=0",
    "no-dropout": "embedding.dropout=0 encoder.dropout=0 decoder.dropout=0",
    "luong_dot": "attention=luong_dot",
    "no-lexical-model": "decoder.lexical=false",
    "untied-output": "embedding.tie_output=false",
    "narrow-embeddings": "embedding.dim=256",
    "larger-batches": "training.batch_sentences=256 training.batch_tokens=8192",
    # Methods that the recipe does not use and a change adds
    "vocabulary-10000": "tokenizer.vocab_size=10000",
    "lstm": "encoder=lstm decoder=lstm",
    "two-layers": "encoder.layers=2 encoder.residual=true",
    "fixnorm": "decoder.fixnorm=true",
    "word-dropout": "embedding.word_dropout=0.1",
    "weight-decay": "optimizer=adamw",
    "bpe-dropout": "tokenizer.sampling=0.1",
    "r-drop": "training.r_drop=5",
    "moving-average": "training.ema_decay=0.999",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("overrides", nargs="+", help="the recipe, as for nmt-train")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; give threads=1 with them")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each change, counted from 1")
    parser.add_argument("--changes", metavar="NAME,NAME", help=f"from: {', '.join(CHANGES)} (default: all)")
    parser.add_argument("--add", action="append", default=[], metavar="NAME=OVERRIDES", help="a change of your own")
    arguments = parser.parse_intermixed_args()
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    names = list(CHANGES) if arguments.changes is None else [*filter(None, arguments.changes.split(","))]
    if unknown := [name for name in names if name not in CHANGES]:
        parser.error(f"--changes: no such change: {', '.join(unknown)} (known: {', '.join(CHANGES)})")
    changes = {name: CHANGES[name] for name in names}
    for text in arguments.add:
        name, sign, change = text.partition("=")
        if not (name and sign and "/" not in name):
            parser.error(f"--add {text}: give it as NAME=OVERRIDES, such as wide=encoder.hidden=512")
        changes[name] = change
    return runs.exit_status(parser.prog, lambda: train_and_compare(arguments, effective(changes, arguments.overrides)))


def effective(changes: dict[str, str], overrides: list[str]) -> dict[str, str]:
    """Return the changes that alter the recipe. Raises UserError for the first change that nmt-train would refuse."""
    recipe, result = compose("train", TrainConfig, overrides), {}
    for name, change in changes.items():
        if compose("train", TrainConfig, [*overrides, *runs.split_overrides(name, change)]) == recipe:
            print(f"{name}: changes nothing in this recipe, left out", file=sys.stderr)
        else:
            result[name] = change
    return result


def train_and_compare(arguments: argparse.Namespace, changes: dict[str, str]) -> int:
    """Train the recipe and all changes with each seed, and compare the runs. Returns the exit status."""
    overrides = {
        arguments.directory / name / str(seed): [
            *arguments.overrides,
            *runs.split_overrides(name, change),
            f"seed={seed}",
        ]
        for seed in range(1, arguments.seeds + 1)
        for name, change in {RECIPE: "", **changes}.items()
    }
    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool, tqdm(total=len(overrides), unit=" runs") as bar:
        for path, status in zip(overrides, pool.map(runs.train, overrides, overrides.values()), strict=True):
            bar.update()
            if status:
                failed += 1
                bar.write(f"{path}: failed, see {runs.log_path(path)}")
    status = runs.compare([arguments.directory], arguments.directory / "comparison")
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
