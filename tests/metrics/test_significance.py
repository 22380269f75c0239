"""The tests are sacreBLEU's: its command line on the same files gives the same numbers."""

import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from nmt.metrics.bleu import METRICS, ScoreSettings, score
from nmt.metrics.significance import Significance, mean_interval

REFERENCES = [f"the {n} small dogs , which run , see {n % 7} red houses ." for n in range(60)]
BASELINE = [line.replace("dogs", "cats") if n % 3 == 0 else line for n, line in enumerate(REFERENCES)]
BETTER = [line.replace("red", "Red") if n % 4 == 0 else line for n, line in enumerate(REFERENCES)]
CLOSE = [line.replace("see", "saw") if n % 3 == 1 and n > 3 else line for n, line in enumerate(REFERENCES)]


def command_line(folder: Path, test: str, count: int, *options: str) -> str:
    """The table that `sacrebleu --paired-...` prints (as JSON it cannot print all of them)."""
    outputs = {"refs": REFERENCES, "baseline": BASELINE, "better": BETTER, "close": CLOSE}
    for name, lines in outputs.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    command = [sys.executable, "-m", "sacrebleu", "refs", "-i", "baseline", "better", "close"]
    command += ["-m", "bleu", "chrf", "ter", "-f", "text", "-w", "6"]
    command += [f"--paired-{test}", f"--paired-{test}-n", str(count), *options]
    environment = {key: value for key, value in os.environ.items() if key != "SACREBLEU_SEED"} | {"NO_COLOR": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def p_values(table: str) -> list[float]:
    """Of each system but the baseline, by metric."""
    return [float(p) for p in re.findall(r"p = ([\d.]+)", table)]


@pytest.mark.parametrize(("lowercase", "options"), [(False, []), (True, ["-lc"])])
def test_scores_intervals_and_p_values_are_those_of_the_command_line(
    lowercase: bool, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    found = Significance(REFERENCES, ScoreSettings("13a", lowercase), 300, 500)(BASELINE, [BETTER, CLOSE])
    bootstrap = command_line(tmp_path, "bs", 300, *options)
    randomised = command_line(tmp_path, "ar", 500, *options)
    printed = re.findall(r"([\d.]+) \([\d.]+ ± ([\d.]+)\)", bootstrap)
    tested = [system[metric] for system in found for metric in METRICS]
    assert [each.score for each in tested] == pytest.approx([float(score) for score, _ in printed], abs=1e-5)
    assert [each.interval for each in tested] == pytest.approx([float(half) for _, half in printed], abs=1e-5)
    others = tested[len(METRICS) :]
    assert [each.p_bootstrap for each in others] == pytest.approx(p_values(bootstrap), abs=1e-4)
    assert [each.p_randomisation for each in others] == pytest.approx(p_values(randomised), abs=1e-4)
    assert {each.p_bootstrap for each in tested[: len(METRICS)]} == {None}
    assert len({each.p_randomisation for each in others}) > 2


def test_the_scores_are_those_of_the_one_scoring_path() -> None:
    settings = ScoreSettings("13a", False)
    significance = Significance(REFERENCES, settings, 100, 100)
    (found,) = significance(BETTER, [])
    expected = score(BETTER, REFERENCES, settings)
    assert {metric: found[metric].score for metric in METRICS} == pytest.approx(
        {metric: getattr(expected, metric) for metric in METRICS}
    )
    assert significance.score(BETTER) == pytest.approx(expected.bleu)


def test_composed_and_decomposed_characters_are_the_same() -> None:
    composed = ["le gar\u00e7on d\u00e9\u00e7u est l\u00e0 ."] * 9
    decomposed = [unicodedata.normalize("NFD", line) for line in composed]
    significance = Significance(decomposed, ScoreSettings("13a", False), 100, 100)
    base, same = significance(composed, [decomposed])
    assert base["bleu"].score == pytest.approx(100)
    assert [each.p_bootstrap for each in same.values()] == [1.0, 1.0, 1.0]
    assert significance.score(composed) == pytest.approx(100)


def test_the_same_output_differs_by_nothing() -> None:
    base, same = Significance(REFERENCES, ScoreSettings("13a", False), 100, 100)(BASELINE, [list(BASELINE)])
    assert {(each.p_bootstrap, each.p_randomisation) for each in same.values()} == {(1.0, 1.0)}
    assert {each.p_bootstrap for each in base.values()} == {None}


def test_no_difference_in_score_is_never_a_certain_one() -> None:
    rubbish = [["a"] * 5, ["b"] * 5]
    base, other = Significance(["x y z w"] * 5, ScoreSettings("13a", False), 100, 100)(rubbish[0], [rubbish[1]])
    assert base["bleu"].score == other["bleu"].score
    assert (other["bleu"].p_bootstrap, other["bleu"].p_randomisation) == (1.0, 1.0)


def test_an_output_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from sacrebleu.metrics.ter import TER

    counted = []
    real = TER._extract_corpus_statistics
    monkeypatch.setattr(TER, "_extract_corpus_statistics", lambda *given: counted.append(given[1]) or real(*given))
    significance = Significance(REFERENCES, ScoreSettings("13a", False), 100, 100)
    significance(BASELINE, [BETTER])
    significance(BETTER, [BASELINE])
    assert counted == [BASELINE, BETTER]


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (11, 2.228), (121, 1.980)])
def test_the_interval_of_a_mean_has_the_quantiles_of_printed_tables(count: int, quantile: float) -> None:
    values = [1.0, *[3.0] * (count - 1)]
    mean, low, high = mean_interval(values)
    assert mean == pytest.approx(sum(values) / count)
    error = (sum((value - mean) ** 2 for value in values) / (count - 1) / count) ** 0.5
    assert [(mean - low) / error, (high - mean) / error] == pytest.approx([quantile, quantile], abs=6e-4)
