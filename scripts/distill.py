"""Knowledge distillation (Kim and Rush 2016): towards an ensemble's quality at the cost of one model.

python scripts/distill.py DIR --student 'optimizer.lr=0.0006 training.max_epochs=2' [--models 3] [--jobs 2] data=...

Trains a recipe with several seeds: the teachers, DIR/teacher/SEED. Then trains a student from each, DIR/student/SEED,
on the teachers' mean prediction, word by word. --student holds overrides for the students alone, such as fewer epochs
and a lower learning rate; with training.start_from=null among them the students start from scratch and may be smaller.
The output of a run is in the .txt file beside it. DIR/comparison compares teachers and students on the validation set.
Started again with the same arguments, the script skips finished runs and resumes interrupted ones.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import compare, finish, reporting_failure, run_parser, run_script, split_overrides
from tqdm import tqdm

from nmt.cli.compose import compose
from nmt.config.errors import UserError, quoted
from nmt.config.schema import TrainConfig
from nmt.data.prepare import fingerprint_of, prepare
from nmt.model.checkpoints import new_model
from nmt.system.files import to_json, write_atomically
from nmt.system.run import read_json
from nmt.training.other_runs import model_differences


def main() -> int:
    parser = run_parser(__doc__, 2, "teachers, and of students")
    parser.add_argument("--student", required=True, metavar="'OVERRIDES'", help="for the students alone")
    return run_script(distill, parser)


def distill(options: argparse.Namespace) -> int:
    """Train teachers and students, and compare them. Returns the exit status."""
    folder, seeds = options.directory, range(1, options.models + 1)
    teachers, students = ([folder / name / str(seed) for seed in seeds] for name in ("teacher", "student"))
    own = split_overrides("--student", options.student)
    objective = ["objective=distillation", f"objective.teachers=[{','.join(map(quoted, teachers))}]"]
    overrides = {run: [*options.overrides, f"seed={seed}"] for run, seed in zip(teachers, seeds, strict=True)}
    overrides |= {
        run: [*options.overrides, *objective, f"training.start_from={quoted(teacher)}", *own, f"seed={seed}"]
        for run, teacher, seed in zip(students, teachers, seeds, strict=True)
    }
    # Check the students' configuration now, not after the teachers' hours of training.
    check_students(*(compose("train", TrainConfig, overrides[runs[0]]) for runs in (teachers, students)))
    begin(folder, {"overrides": options.overrides, "models": options.models, "student": own})
    with ThreadPoolExecutor(options.jobs) as pool, tqdm(total=len(overrides), unit=" runs") as bar:
        failures: list[UserError] = []

        def train(run: Path) -> None:
            with reporting_failure(failures, bar):
                finish(run, overrides[run])
            bar.update()

        for runs in (teachers, students):
            list(pool.map(train, runs))
    return compare([folder / "teacher", folder / "student"], folder / "comparison")


def check_students(teacher: TrainConfig, student: TrainConfig) -> None:
    """Raises UserError for mistakes that the students' runs would report only after the teachers are trained."""
    if student.training.start_from is not None and (differences := model_differences(teacher, student)):
        tokenizers = prepare(teacher.data, teacher.tokenizer).tokenizers
        models = [new_model(config, tokenizers).state_dict() for config in (teacher, student)]
        shapes = [{name: weights.shape for name, weights in model.items()} for model in models]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"--student: the teacher's weights do not fit the student's model ({'; '.join(differences)}); with "
                "training.start_from=null it starts from scratch"
            )
    if student.tokenizer.kind == "file":  # the file may be that of a teacher, which does not exist yet
        return
    if fingerprint_of(student.data, student.tokenizer) != fingerprint_of(teacher.data, teacher.tokenizer):
        raise UserError(
            "--student: another corpus gives another tokenizer; use the teachers': tokenizer=file "
            "tokenizer.source_model=DIR/teacher/1/tokenizer.model"
        )


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Record the settings in the folder. Raises UserError if the folder holds runs with other settings."""
    path = folder / "distill.json"
    saved = read_json(path) or settings
    if saved.get("overrides") != settings["overrides"]:
        raise UserError(f"{folder}: was started with other values ({path}); give another folder")
    if saved != settings and any(folder.glob("student/*/config.yaml")):
        raise UserError(f"{folder}: has students of other --student or --models ({path}); move {folder}/student away")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_json(settings, indent=2).encode())


if __name__ == "__main__":
    sys.exit(main())
