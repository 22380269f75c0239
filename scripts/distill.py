"""Models that have learned what all of them predict together: an ensemble's quality at the cost of one model.

python scripts/distill.py DIR --student 'optimizer.lr=...' [--models 3] [--jobs 2] experiment=... data=...

Trains a recipe with several seeds (DIR/teacher/SEED). Then each model goes on as a student (DIR/student/SEED) that
learns what the teachers predict on average, word by word (knowledge distillation, Kim and Rush 2016); --student are
values for this alone, such as fewer epochs and a lower learning rate. What each run printed lies beside it;
DIR/comparison compares teachers and students on the validation set. With the same DIR again, what has finished is not
trained again and what was interrupted goes on.
"""

import argparse
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ablation import command
from diversify import finish
from tqdm import tqdm

from nmt.cli.preview import preview
from nmt.config.errors import UserError
from nmt.config.overrides import quoted
from nmt.config.schema import TrainConfig


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("overrides", nargs="+", help="the recipe, as for nmt-train")
    parser.add_argument("--student", required=True, metavar="OVERRIDES", help="for the students alone")
    parser.add_argument("--models", type=int, default=2, help="teachers, and students; seeds from 1 on")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; give threads=1 with them")
    options = parser.parse_intermixed_args()
    if options.models < 1 or options.jobs < 1:
        parser.error("--models and --jobs must be at least 1")
    try:
        return distill(options)
    except (UserError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130


def distill(options: argparse.Namespace) -> int:
    """All of it. Returns the exit status."""
    seeds = range(1, options.models + 1)
    teachers, students = ([options.directory / name / str(seed) for seed in seeds] for name in ("teacher", "student"))
    taught = ["objective=distillation", f"objective.teachers=[{','.join(map(quoted, teachers))}]"]
    taught += shlex.split(options.student)
    for given in (options.overrides, [*options.overrides, *taught]):
        preview("train", TrainConfig, given)
    work = {run: [*options.overrides, f"seed={seed}"] for run, seed in zip(teachers, seeds, strict=True)}
    after = {
        run: [*options.overrides, *taught, f"training.start_from={quoted(teacher)}", f"seed={seed}"]
        for run, teacher, seed in zip(students, teachers, seeds, strict=True)
    }
    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(work) + len(after), unit=" runs") as bar:
        for runs in (work, after):
            for _ in pool.map(finish, runs, runs.values()):
                bar.update()
    names = [quoted(options.directory / name) for name in ("teacher", "student")]
    compare = [command("nmt-compare"), f"runs=[{','.join(names)}]", "split=validation"]
    return subprocess.run([*compare, f"output={quoted(options.directory / 'comparison')}"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
