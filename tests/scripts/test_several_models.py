"""The scripts that train several models: arguments of each run, no work done twice, and the end after a failure."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from conftest import TINY, run_config, script
from forks import call_text

from nmt.data.corpus import DemoPairs

SCRIPTS = Path(script("runs").__file__).parent
APART = "embedding.tie_source_target=false"
FILES = ["data=files", "data.train=a", "data.validation=b"]
pytestmark = pytest.mark.system


def run(name: str, folder: Path, *words: str, status: int = 0) -> str:
    """Run a script, and return its standard output and error."""
    done = call_text(SCRIPTS / f"{name}.py", *words, cwd=folder)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def pairs_of(folder: Path, *names: str) -> list[tuple[str, ...]]:
    return list(zip(*((folder / name).read_text().splitlines() for name in names), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", script("ablation").CHANGES)
def test_each_change_of_an_ablation_is_valid_and_changes_the_recipe(name: str) -> None:
    recipe = "experiment=multi30k_en_de_best"
    assert run_config(recipe, *shlex.split(script("ablation").CHANGES[name])) != run_config(recipe)


def test_an_ablation_leaves_out_what_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"none": "decoder.lexical=false", "wide": "encoder.hidden=512", "other": "seed=2"}
    kept = script("ablation").effective(changes, ["attention=bahdanau", "encoder.hidden=256"])
    assert list(kept) == ["wide", "other"]
    assert "none: changes nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_an_ablation_is_compared_and_not_repeated(tmp_path: Path) -> None:
    changes = ["--changes", "no-dropout", "--add", "wide=encoder.hidden=32 decoder.hidden=64"]
    words = ["out", *changes, *TINY, "training.max_steps=3"]
    told = run("ablation", tmp_path, *words)
    assert all(part in told for part in ("validation: 8 sentences", "hidden=32", "dropout=0"))
    trained = {path: path.read_bytes() for path in tmp_path.glob("out/*/1/metrics.jsonl")}
    assert {path.parts[-3] for path in trained} == {"recipe", "no-dropout", "wide"}
    run("ablation", tmp_path, *words)
    assert all(path.read_bytes() == before for path, before in trained.items())


@pytest.mark.slow
def test_each_student_goes_on_from_one_teacher_and_learns_from_all(tmp_path: Path) -> None:
    words = ["out", *TINY, "training.max_steps=3", "search.max_length=8", "--student", "training.max_steps=2"]
    run("distill", tmp_path, *words, "--models", "2", "--jobs", "2")
    out = tmp_path / "out"
    for seed in ("1", "2"):
        teacher, student = (yaml.safe_load((out / name / seed / "config.yaml").read_text()) for name in TWO)
        assert teacher["seed"] == student["seed"] == int(seed)
        assert (teacher["training"]["max_steps"], student["training"]["max_steps"]) == (3, 2)
        assert student["objective"]["teachers"] == [str(out / "teacher" / "1"), str(out / "teacher" / "2")]
        assert student["training"]["start_from"] == str(out / "teacher" / seed)
    (compared,) = json.loads((out / "comparison" / "comparison.json").read_text())["comparisons"]
    assert sorted(len(system["seeds"]) for system in compared["systems"]) == [2, 2]
    told = run("distill", tmp_path, *words, "--models", "1", status=2)
    assert "out: has students of other --student or --models (out/distill.json); move out/student away" in told
    times = {path: path.stat().st_mtime_ns for path in out.rglob("last.pt")}
    run("distill", tmp_path, *words, "--models", "2")
    assert {path: path.stat().st_mtime_ns for path in times} == times


TWO = ("teacher", "student")


def test_students_may_begin_anew_and_have_a_tokenizer_of_their_teachers() -> None:
    def check(*own: str, tiny: list[str] = TINY) -> None:
        script("distill").check_students(run_config(*TINY), run_config(*tiny, "training.start_from=T", *own))

    check("decoder.dropout=0.3", "tokenizer.sampling=0.1", "training.batch_tokens=100")
    check("training.start_from=null", "encoder.hidden=8")
    theirs = ["tokenizer=file", "tokenizer.source_model=out/teacher/1/tokenizer.model"]
    check("data.train_size=100", *theirs, tiny=[word for word in TINY if not word.startswith("tokenizer.")])


@pytest.mark.slow
def test_a_student_learns_what_both_directions_made(tmp_path: Path) -> None:
    for name, pairs in (("train", DemoPairs(10, 150)), ("valid", DemoPairs(0, 10))):
        for side, lang in enumerate(("en", "fr")):
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    corpus = ["data=files", "data.train=train", "data.validation=valid", "data.target_lang=fr"]
    corpus += [value for value in TINY if not value.startswith("data.")]
    words = ["out", *corpus, "tokenizer.vocab_size=250", "training.max_steps=3", "data.cache_dir=cache"]
    words += ["search.max_length=8"]
    student = ["--student", "training.max_steps=4"]
    run("diversify", tmp_path, *words, *student)
    out, texts = tmp_path / "out", pairs_of(tmp_path, "train.en", "train.fr")
    ways = ("forward", "backward")
    forward, backward = ([line for (line,) in pairs_of(out / way, "1.translations")] for way in ways)
    expected = [(source, made) for (source, _), made in zip(texts, forward, strict=True)]
    expected += [(made, target) for (_, target), made in zip(texts, backward, strict=True)]
    new = [pair for pair in dict.fromkeys(expected) if all(pair) and pair not in texts]
    assert pairs_of(out / "translations", "train.en", "train.fr") == new
    assert max(len(line.split()) for line in forward) <= 8  # the limit of the recipe's search
    data = [yaml.safe_load((out / way / "1" / "config.yaml").read_text())["data"] for way in ways]
    assert [(each["source_lang"], each["target_lang"]) for each in data] == [("en", "fr"), ("fr", "en")]
    learned = yaml.safe_load((out / "student" / "config.yaml").read_text())
    assert learned["data"]["extra"] == [str(out / "translations" / "train")]
    assert learned["training"]["max_steps"] == 4
    before = {path: path.read_bytes() for path in out.glob("**/metrics.jsonl")}
    assert len(before) == 3
    told = run("diversify", tmp_path, *words, "--student", "training.max_steps=5", status=2)
    assert "out/student: is of another student, of the values 'training.max_steps=4'" in told
    run("diversify", tmp_path, *words, *student, "--student", "training.max_steps=1 data.extra=[valid]")
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(pairs_of(out / "translations-2", "train.en", "train.fr")) > len(new)
    second = yaml.safe_load((out / "student-2" / "config.yaml").read_text())["data"]["extra"]
    assert second == [str(tmp_path / "valid"), str(out / "translations-2" / "train")]


@pytest.mark.parametrize(
    ("overrides", "turned"),
    [
        (FILES, "data.source_column=null data.target_column=null"),
        ([*FILES, "data.source_column=in"], "data.source_column=null data.target_column=in"),
        (["data=hub", "data.id=x"], "data.source_column=translation.de data.target_column=translation.en"),
        (
            [*FILES, "tokenizer=file", "tokenizer.source_model=s", "tokenizer.target_model=t", APART],
            "data.source_column=null data.target_column=null tokenizer.source_model=t tokenizer.target_model=s",
        ),
    ],
)
def test_backwards_both_sides_are_exchanged(overrides: list[str], turned: str) -> None:
    found = script("diversify").backwards(run_config(*overrides))
    assert found == ["data.source_lang=de", "data.target_lang=en", *turned.split()]
    assert script("diversify").backwards(run_config(*overrides, *found))[:2] == [
        "data.source_lang=en",
        "data.target_lang=de",
    ]
