"""Models that have learned what all of them predict together: towards an ensemble's quality at the cost of one model.

python scripts/distill.py DIR --student 'optimizer.lr=0.0006 training.max_epochs=2' [--models 3] [--jobs 2] data=...

Trains a recipe with several seeds (DIR/teacher/SEED). Then each model goes on as a student (DIR/student/SEED) that
learns what the teachers predict on average, word by word (knowledge distillation, Kim and Rush 2016); --student are
values for this alone, such as fewer epochs and a lower learning rate; with training.start_from=null among them the
students begin anew and may be smaller. What each run printed lies beside it; DIR/comparison compares teachers and
students on the validation set. With the same DIR and values again, what has finished is not trained again and what was
interrupted goes on.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import call, command, finish, several, split, told
from tqdm import tqdm

from nmt.cli.compose import preview
from nmt.config.errors import UserError
from nmt.config.overrides import quoted
from nmt.config.schema import TrainConfig
from nmt.data.prepare import fingerprint_of, prepare
from nmt.files import to_json, write_atomically
from nmt.model.load import new_model
from nmt.run import read_json
from nmt.training.start import model_differences


def main() -> int:
    """Entry point."""
    parser = several(__doc__, 2, "teachers, and students")
    parser.add_argument("--student", required=True, metavar="'OVERRIDES'", help="for the students alone")
    return call(distill, parser)


def distill(options: argparse.Namespace) -> int:
    """All of it. Returns the exit status."""
    folder, seeds = options.directory, range(1, options.models + 1)
    teachers, students = ([folder / name / str(seed) for seed in seeds] for name in ("teacher", "student"))
    own = split("--student", options.student)
    taught = ["objective=distillation", f"objective.teachers=[{','.join(map(quoted, teachers))}]"]
    work = {run: [*options.overrides, f"seed={seed}"] for run, seed in zip(teachers, seeds, strict=True)}
    work |= {
        run: [*options.overrides, *taught, f"training.start_from={quoted(teacher)}", *own, f"seed={seed}"]
        for run, teacher, seed in zip(students, teachers, seeds, strict=True)
    }
    # What is wrong with the students is told now, not in some hours.
    refuse_unfit(*(preview("train", TrainConfig, work[runs[0]]) for runs in (teachers, students)))
    begin(folder, {"overrides": options.overrides, "models": options.models, "student": own})
    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(work), unit=" runs") as bar:

        def one(run: Path) -> None:
            with told(pool, bar):
                finish(run, work[run])
            bar.update()

        for runs in (teachers, students):
            list(pool.map(one, runs))
    names = [quoted(folder / name) for name in ("teacher", "student")]
    compare = [command("nmt-compare"), f"runs=[{','.join(names)}]", "split=validation"]
    return subprocess.run([*compare, f"output={quoted(folder / 'comparison')}"], check=False).returncode


def refuse_unfit(teacher: TrainConfig, student: TrainConfig) -> None:
    """Raises UserError for what the students' runs would refuse when the teachers have been trained."""
    if student.training.start_from is not None and (others := model_differences(teacher, student)):
        tokenizers = prepare(teacher.data, teacher.tokenizer).tokenizers
        models = [new_model(config, tokenizers).state_dict() for config in (teacher, student)]
        theirs, its = ({name: weights.shape for name, weights in model.items()} for model in models)
        if theirs != its:
            raise UserError(
                f"--student: it goes on with a teacher's weights, which do not fit its model ({'; '.join(others)}); "
                "with training.start_from=null it begins anew"
            )
    if student.tokenizer.kind == "file":  # one of the teachers', which is not there yet
        return
    if fingerprint_of(student.data, student.tokenizer) != fingerprint_of(teacher.data, teacher.tokenizer):
        raise UserError(
            "--student: of another corpus comes another tokenizer; give it that of the teachers: tokenizer=file "
            "tokenizer.source_model=DIR/teacher/1/tokenizer.model"
        )


def begin(folder: Path, asked: dict[str, Any]) -> None:
    """Raises UserError if something else was begun there, whose runs would be taken for this one's."""
    path = folder / "distill.json"
    before = read_json(path) or asked
    if before.get("overrides") != asked["overrides"]:
        raise UserError(f"{folder}: was begun with other values ({path}); give another folder")
    if before != asked and any(folder.glob("student/*/config.yaml")):
        raise UserError(f"{folder}: has students of other --student or --models ({path}); move {folder}/student away")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json(asked, indent=2).encode())


if __name__ == "__main__":
    sys.exit(main())
