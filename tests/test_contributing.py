"""The recipes in CONTRIBUTING for an extension, such as a score, an optimizer or a search, work in a copy of nmt."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parent.parent
FILES = re.compile(r"`((?:nmt|configs|tests)/[\w/.]+\.(?:py|yaml))`")
BLOCK = re.compile(r"```(python|diff|yaml)\n(.*?)```", re.DOTALL)
TRAIN = "from nmt.cli.train import main; main()"
NUMBERS = {"two": 2, "four": 4, "five": 5}
# The name of each recipe's example, and another name that it may have.
RECIPES = {
    "score": ("low_rank", "slim"),
    "loss": ("focal", "lenient"),
    "loss term": ("attention_entropy", "attention_spread"),
    "metric": ("length_ratio", "word_ratio"),
    "optimizer": ("adagrad", "adamax"),
    "schedule": ("exponential", "dwindling"),
    "search": ("epsilon", "threshold"),
}


def steps(what: str) -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(rf"^## An? {what} of your own, in (\w+) steps\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert found, what
    taken = re.split(r"^\d\. ", found[2], flags=re.MULTILINE)[1:]
    assert len(taken) == NUMBERS[found[1]]
    return taken


def renamed(step: str, what: str) -> str:
    """The step for an example with another name."""
    old, new = RECIPES[what]
    for spelled in (str, lambda name: "".join(map(str.capitalize, name.split("_")))):
        step = step.replace(spelled(old), spelled(new))
    return step


def replacement(diff: str) -> tuple[str, str]:
    """What a diff replaces, and by what, without the unchanged end of a replaced last line, which may have grown."""
    lines = diff.splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[0] in {" ", sign}) for sign in "-+")
    while lines[-2][0] == "-" and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return before, after


def take(step: str, root: Path) -> None:
    """Apply each block of a step to the last file named before the block."""
    blocks = list(BLOCK.finditer(step))
    assert blocks
    for found in blocks:
        kind, block = found.groups()
        path = root / FILES.findall(step[: found.start()])[-1]
        if kind == "diff":
            before, after = replacement(block)
            text = path.read_text(encoding="utf-8")
            assert text.count(before) == 1, f"{path.name} no longer holds:\n{before}"
            path.write_text(text.replace(before, after), encoding="utf-8")
        elif path.exists():
            path.write_text(f"{path.read_text(encoding='utf-8')}\n\n{block}", encoding="utf-8")
        else:
            path.write_text(block, encoding="utf-8")


def python(root: Path, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def copy_with_steps(what: str, root: Path) -> None:
    for part in ("nmt", "configs", "tests"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for step in steps(what):
        take(step, root)


def train(root: Path, *overrides: str, without: str = "none of them") -> str:
    """Train a short run, and return its configuration. without: prefix of the overrides of TINY to leave out."""
    tiny = [override for override in TINY if not override.startswith(without)]
    done = python(root, "-c", TRAIN, *tiny, "training.max_steps=2", "hydra.run.dir=run", *overrides)
    assert done.returncode == 0, done.stderr
    return (root / "run" / "config.yaml").read_text()


def passed(root: Path, *arguments: str) -> int:
    done = python(root, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    assert done.returncode == 0, done.stdout
    return int(re.findall(r"(\d+) passed", done.stdout)[0])


@pytest.mark.parametrize("what", RECIPES)
def test_the_steps_fit_the_code_even_with_a_further_part(what: str, tmp_path: Path) -> None:
    todo = [renamed(step, what) for step in steps(what)] + steps(what)
    for name in {name for step in todo for name in FILES.findall(step)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    for step in todo:
        take(step, tmp_path)


@pytest.mark.slow
def test_five_steps_make_a_score_that_keeps_the_laws_and_trains(tmp_path: Path) -> None:
    copy_with_steps("score", tmp_path)
    config = train(tmp_path, "attention=luong_general", "attention/score=low_rank", "attention.score.rank=5")
    assert "kind: low_rank" in config
    assert "rank: 5" in config
    assert passed(tmp_path, "tests/attention", "-k", "low_rank", "-m", "slow or not slow") > 60


@pytest.mark.slow
def test_two_steps_make_a_metric_that_is_monitored_and_ranks(tmp_path: Path) -> None:
    copy_with_steps("metric", tmp_path)
    train(tmp_path, "evaluation.metrics=[bleu,length_ratio]", "validation.monitor=length_ratio")
    assert "validation/length_ratio" in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "length %" in (tmp_path / "run" / "train.log").read_text()
    main = "from nmt.cli.evaluate import compare_main; compare_main()"
    done = python(
        tmp_path, "-c", main, "runs=run", "metric=length_ratio", "bootstrap_samples=100", "randomisation_trials=100"
    )
    assert done.returncode == 0, done.stderr
    assert "length % words split at spaces" in done.stdout
    assert passed(tmp_path, "tests/evaluate/test_length_ratio.py") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "overrides", "told", "refused"),
    [
        ("optimizer", "optimizer=adagrad optimizer.lr=0.05", "kind: adagrad", {}),
        ("schedule", "schedule=exponential schedule.half_life=500", "half_life: 500", {}),
        ("loss", "objective=focal", "kind: focal", {"training.r_drop=1": "training.r_drop=1.0 needs objective=like"}),
        (
            "loss term",
            "training.attention_entropy=0.1",
            "attention_entropy: 0.1",
            {
                "attention=none": "training.attention_entropy=0.1 needs an attention, but",
                "attention=hard": "training.attention_entropy=0.1 needs a gradient through the weights, but",
            },
        ),
    ],
)
def test_the_steps_make_a_part_that_trains(
    what: str, overrides: str, told: str, refused: dict[str, str], tmp_path: Path
) -> None:
    copy_with_steps(what, tmp_path)
    assert told in train(tmp_path, *overrides.split())
    test = next(name for name in FILES.findall(steps(what)[-1]) if name.startswith("tests/"))
    assert passed(tmp_path, test) >= 1
    for other, message in refused.items():
        assert message in python(tmp_path, "-c", TRAIN, *TINY, *overrides.split(), other).stderr


@pytest.mark.slow
def test_five_steps_make_a_search_that_translates(tmp_path: Path) -> None:
    copy_with_steps("search", tmp_path)
    assert "kind: epsilon" in train(tmp_path, "search=epsilon", without="search.beam_size")
    assert passed(tmp_path, "tests/translate/test_epsilon.py") == 1
    main = "import sys; from nmt.cli.translate import main; main()"
    done = python(tmp_path, "-c", main, "run=run", "search.epsilon=0.1", "nbest=2", stdin="the cat\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 2
