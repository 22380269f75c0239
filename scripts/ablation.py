"""What each method adds: a recipe trained once as it is, and once for each change; compared on the validation set.

python scripts/ablation.py DIR [--jobs 2] [--seeds 3] [--changes NAME,NAME] experiment=multi30k_en_de_best ...

Each run lies in DIR/NAME/SEED, what it printed in DIR/NAME/SEED.txt, the comparison in DIR/comparison. With the same
DIR again, what has finished is not trained again and what was interrupted goes on. Changes that change nothing of this
recipe are left out. A change of one's own: --add 'wide=encoder.hidden=512 decoder.hidden=1024'.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runs import command, printed, split, train
from tqdm import tqdm

from nmt.cli.compose import preview
from nmt.config.errors import UserError
from nmt.config.overrides import quoted
from nmt.config.schema import TrainConfig

RECIPE = "recipe"
CHANGES = {
    # What the recipe has, taken away
    "no-label-smoothing": "training.label_smoothing=0",
    "no-dropout": "embedding.dropout=0 encoder.dropout=0 decoder.dropout=0",
    "luong_dot": "attention=luong_dot",
    "no-lexical-model": "decoder.lexical=false",
    "untied-output": "embedding.tie_output=false",
    "narrow-embeddings": "embedding.dim=256",
    "larger-batches": "training.batch_sentences=256 training.batch_tokens=8192",
    # What it has not, added
    "vocabulary-10000": "tokenizer.vocab_size=10000",
    "lstm": "encoder=lstm decoder=lstm",
    "transitions": "encoder.transition_depth=1 decoder.transition_depth=1",
    "two-layers": "encoder.layers=2 encoder.residual=true",
    "fixnorm": "decoder.fixnorm=true",
    "layer-norm": "encoder.layer_norm=true decoder.layer_norm=true",
    "variational-dropout": "variational_dropout=true",
    "recurrent-dropout": "encoder.recurrent_dropout=0.2 decoder.recurrent_dropout=0.2",
    "word-dropout": "embedding.word_dropout=0.1",
    "zoneout": "encoder.zoneout=0.1 decoder.zoneout=0.1",
    "weight-drop": "encoder.weight_drop=0.2 decoder.weight_drop=0.2",
    "weight-decay": "optimizer=adamw",
    "bpe-dropout": "tokenizer.sampling=0.1",
    "bpe-dropout-of-the-source": "tokenizer.sampling=0.1 tokenizer.sampling_sides=source",
    "r-drop": "training.r_drop=5",
    "scheduled-sampling": "training.scheduled_sampling=0.2 training.scheduled_sampling_steps=3000",
    "moving-average": "training.ema_decay=0.999",
    "best-checkpoints": "training.average_best=5",
    "restarts": "schedule.cycles=2",
}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("overrides", nargs="+", help="the recipe, as for nmt-train")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; give threads=1 with them")
    parser.add_argument("--seeds", type=int, default=1, help="of each run: 1 to so many")
    parser.add_argument("--changes", metavar="NAME,NAME", help=f"of: {', '.join(CHANGES)} (default: all)")
    parser.add_argument("--add", action="append", default=[], metavar="NAME=OVERRIDES", help="another change")
    arguments = parser.parse_intermixed_args()
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    wanted = list(CHANGES) if arguments.changes is None else [*filter(None, arguments.changes.split(","))]
    if unknown := [name for name in wanted if name not in CHANGES]:
        parser.error(f"--changes: no such change: {', '.join(unknown)} (there are: {', '.join(CHANGES)})")
    changes = {name: CHANGES[name] for name in wanted}
    for text in arguments.add:
        name, sign, change = text.partition("=")
        if not (name and sign and "/" not in name):
            parser.error(f"--add {text}: give it as NAME=OVERRIDES, such as wide=encoder.hidden=512")
        changes[name] = change
    try:
        changes = effective(changes, arguments.overrides)
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    try:
        return compare(arguments, changes)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130


def effective(changes: dict[str, str], overrides: list[str]) -> dict[str, str]:
    """Those that change something. Raises UserError for the first that nmt-train would not take, before any is run."""
    plain, found = preview("train", TrainConfig, overrides), {}
    for name, change in changes.items():
        if preview("train", TrainConfig, [*overrides, *split(name, change)]) == plain:
            print(f"{name}: changes nothing of this recipe, left out", file=sys.stderr)
        else:
            found[name] = change
    return found


def compare(arguments: argparse.Namespace, changes: dict[str, str]) -> int:
    """All runs and their comparison. Returns the exit status."""
    work = {
        arguments.directory / name / str(seed): [*arguments.overrides, *split(name, change), f"seed={seed}"]
        for seed in range(1, arguments.seeds + 1)
        for name, change in {RECIPE: "", **changes}.items()
    }
    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool, tqdm(total=len(work), unit=" runs") as bar:
        for path, status in zip(work, pool.map(train, work, work.values()), strict=True):
            bar.update()
            if status:
                failed += 1
                bar.write(f"{path}: failed, see {printed(path)}")
    comparison = arguments.directory / "comparison"
    given = [f"runs={quoted(arguments.directory)}", "split=validation", f"output={quoted(comparison)}"]
    compared = subprocess.run([command("nmt-compare"), *given], check=False).returncode
    return 1 if failed or compared else 0


if __name__ == "__main__":
    sys.exit(main())
