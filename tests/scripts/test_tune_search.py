"""scripts/tune_search.py prints the scores of nmt-evaluate, and does not read the test set."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import tiny_config
from forks import call_text
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from nmt.config.schema.commands import Evaluation
from nmt.evaluate.evaluation import evaluate, score_settings
from nmt.system.run import RunDirectory
from nmt.training.job import train
from nmt.translate.translator import Translator

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "scripts" / "tune_search.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory = tmp_path_factory.mktemp("tune") / "run"
    config = tiny_config("data.train_size=400", "search.max_length=12")
    assert train(config, directory) == 0
    for path in (directory / "data").glob("test.*"):
        path.unlink()
    return RunDirectory(directory)


def tune(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return call_text(SCRIPT, *words, cwd=folder)


def test_the_table_is_that_of_evaluations_without_the_test_set(run: RunDirectory, tmp_path: Path) -> None:
    before = sorted(run.path.rglob("*"))
    done = tune(tmp_path, run.path, "--beams", "4", "1", "--average", "0.0", "2.0", "--gnmt", "1.0", "--coverage", "5")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("tune_search.json")
    assert path.is_relative_to(tmp_path / "outputs" / "tune_search")
    found = json.loads(path.read_text())
    rows = found["settings"]
    keys = ("beam_size", "length_penalty", "alpha", "coverage_penalty")
    plain = [tuple(row[key] for key in keys) for row in rows if row["coverage_penalty"] == 0]
    penalties = [("none", None), ("average", 0.0), ("average", 2.0), ("gnmt", 1.0)]
    assert set(plain) == {(1, "none", None, 0.0), *((4, *penalty, 0.0) for penalty in penalties)}
    (covered,) = (row for row in rows if row["coverage_penalty"] == 5.0)
    assert tuple(covered[key] for key in keys) == (*plain[0][:3], 5.0)  # uses the best other settings
    assert [row["bleu"] for row in rows] == sorted((row["bleu"] for row in rows), reverse=True)
    assert len({row["brevity_ratio"] for row in rows}) > 1  # the settings have an effect
    sources, references, _ = run.held_out("validation")
    tokens = Tokenizer13a()
    settings = score_settings(Evaluation(metrics=["bleu", "chrf", "ter"], tokenize="auto", lowercase=False), "fr")
    for row in rows:
        given = dict(word.removeprefix("search.").split("=") for word in row["override"].split())
        search = {key: row[key] for key in keys}
        assert {key: str(value) for key, value in search.items() if value is not None} == given
        again = evaluate(Translator.load(run.path, search=search), sources, references, settings, ("bleu", "chrf"))
        assert (row["bleu"], row["chrf"]) == pytest.approx((again.scores["bleu"], again.scores["chrf"]))
        words = [sum(len(tokens(line).split()) for line in side) for side in (again.hypotheses, references)]
        assert row["brevity_ratio"] == pytest.approx(words[0] / words[1])
        assert row["seconds"] > 0
    assert found["best"] == rows[0]["override"]
    assert found["command"] == f"nmt-translate run={run.path} {found['best']} < input > output"
    assert found["command"] in done.stdout
    assert path.with_suffix(".md").read_text() in done.stdout
    assert sorted(run.path.rglob("*")) == before
