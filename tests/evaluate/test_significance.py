"""Tests of two outputs equal sacreBLEU's; tests of several outputs agree with MultEval's published example."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nmt.evaluate.metrics import Counts, ScoreSettings, count
from nmt.evaluate.significance import Resampling, corpus_score, half_width, paired_bootstrap

REFERENCES = [f"the {n} small dogs , which run , see {n % 7} red houses ." for n in range(60)]
BASELINE = [line.replace("dogs", "cats") if n % 3 == 0 else line for n, line in enumerate(REFERENCES)]
BETTER = [line.replace("red", "Red") if n % 4 == 0 else line for n, line in enumerate(REFERENCES)]
CLOSE = [line.replace("see", "saw") if n % 3 == 1 and n > 3 else line for n, line in enumerate(REFERENCES)]


def command_line(folder: Path, test: str, count: int, *options: str) -> str:
    """Run `sacrebleu --paired-...`, and return the table that it prints (its JSON lacks some values)."""
    outputs = {"refs": REFERENCES, "baseline": BASELINE, "better": BETTER, "close": CLOSE}
    for name, lines in outputs.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    command = [sys.executable, "-m", "sacrebleu", "refs", "-i", "baseline", "better", "close"]
    command += ["-m", "bleu", "chrf", "ter", "-f", "text", "-w", "6"]
    command += [f"--paired-{test}", f"--paired-{test}-n", str(count), *options]
    environment = {key: value for key, value in os.environ.items() if key != "SACREBLEU_SEED"} | {"NO_COLOR": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def p_values(table: str) -> list[float]:
    """Read the p-values from the table: all systems but the baseline, metric by metric."""
    return [float(p) for p in re.findall(r"p = ([\d.]+)", table)]


def counted(output: list[str], lowercase: bool = False) -> dict[str, Counts]:
    return dict(count(output, REFERENCES, ScoreSettings("13a", lowercase)).counts)


def bootstrap_p(
    resampling: Resampling, baseline: NDArray[np.float64], output: NDArray[np.float64], metric: str
) -> float:
    samples = resampling.bootstrap([baseline, output], metric)
    return paired_bootstrap(samples[0], samples[1], corpus_score(output, metric) - corpus_score(baseline, metric))


@pytest.mark.parametrize(("lowercase", "options"), [(False, []), (True, ["-lc", "--chrf-lowercase"])])
def test_scores_intervals_and_p_values_are_those_of_the_command_line(
    lowercase: bool, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    base, *others = outputs = [counted(lines, lowercase) for lines in (BASELINE, BETTER, CLOSE)]
    resampling = Resampling(len(REFERENCES), 300, 500)
    bootstrap = command_line(tmp_path, "bs", 300, *options)
    printed = re.findall(r"([\d.]+) \([\d.]+ ± ([\d.]+)\)", bootstrap)
    scores = [corpus_score(output[metric], metric) for output in outputs for metric in base]
    assert scores == pytest.approx([float(value) for value, _ in printed], abs=1e-5)
    halves = [half_width(resampling.bootstrap([output[name]], name)[0]) for output in outputs for name in base]
    assert halves == pytest.approx([float(half) for _, half in printed], abs=1e-5)
    found = [bootstrap_p(resampling, base[name], output[name], name) for output in others for name in base]
    assert found == pytest.approx(p_values(bootstrap), abs=1e-4)
    randomised = [p for output in others for p in resampling.paired_randomisation(base, output).values()]
    assert randomised == pytest.approx(p_values(command_line(tmp_path, "ar", 500, *options)), abs=1e-4)
    assert len(set(randomised)) > 2


def test_equal_scores_differ_by_nothing() -> None:
    resampling = Resampling(5, 100, 100)
    one, other = (count([word] * 5, ["x y z w"] * 5, ScoreSettings("13a", False)).counts for word in "ab")
    assert corpus_score(one["bleu"], "bleu") == corpus_score(other["bleu"], "bleu")
    assert bootstrap_p(resampling, one["bleu"], other["bleu"], "bleu") == 1.0
    assert set(resampling.paired_randomisation(one, other).values()) == {1.0}
    assert resampling.stratified_randomisation([[one["bleu"]], [other["bleu"]]], [(0, 1)], "bleu") == [1.0]


def means(*scores: float) -> NDArray[np.float64]:
    return np.array([[score, 1.0] for score in scores])


def test_p_values_of_means_are_those_of_all_resamples_and_all_signs(mean_metric: str) -> None:
    base, output = means(0.7, 0.5, 0.5, 0.6, 0.3), means(0.92, 0.41, 0.7, 0.83, 0.3)
    differences = (output - base)[:, 0]
    resampled = np.abs([differences[list(drawn)].mean() for drawn in itertools.product(range(5), repeat=5)])
    signed = np.abs([(differences * signs).mean() for signs in itertools.product((-1, 1), repeat=5)])
    exact = [(values > abs(differences.mean()) + 1e-9).mean() for values in (resampled - resampled.mean(), signed)]
    resampling = Resampling(5, 20_000, 20_000)
    randomised = resampling.paired_randomisation({mean_metric: base}, {mean_metric: output})[mean_metric]
    assert [bootstrap_p(resampling, base, output, mean_metric), randomised] == pytest.approx(exact, abs=0.01)
    dealt = resampling.stratified_randomisation([[base], [output]], [(0, 1)], mean_metric)
    assert dealt == pytest.approx([randomised], abs=0.01)  # with one output per system, both tests are equal


def test_the_seed_is_that_of_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[float, ...]:
        resampling, outputs = Resampling(len(REFERENCES), 100, 300), [counted(BASELINE), counted(CLOSE)]
        dealt = resampling.stratified_randomisation([[output["bleu"]] for output in outputs], [(0, 1)], "bleu")
        return (*resampling.paired_randomisation(*outputs).values(), *dealt)

    first = found()
    assert found() == first
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    assert all(a != b for a, b in zip(found(), first, strict=True))


def test_stratified_randomisation_is_that_of_all_exchanges(mean_metric: str) -> None:
    """Enumerates the exchanges in two sentences, of two outputs of system a and one of b. A draw chooses the output of
    a, a coin decides whether it is exchanged.
    """
    a, b = [means(0.9, 0.4), means(0.75, 0.5)], [means(0.3, 0.2)]
    observed = abs(np.mean(a, axis=0)[:, 0].mean() - b[0][:, 0].mean())
    sentences = [[(0.5, None), (0.25, 0), (0.25, 1)]] * 2  # (probability, output of a that is exchanged)
    exact = 0.0
    for choices in itertools.product(*sentences):
        first, second = [np.array([rows[:, 0] for rows in side]) for side in (a, b)]
        for sentence, (_, run) in enumerate(choices):
            if run is not None:
                first[run, sentence], second[0, sentence] = second[0, sentence], first[run, sentence]
        exact += np.prod([p for p, _ in choices]) * (abs(first.mean() - second.mean()) > observed + 1e-9)
    other = [means(0.3, 0.4), means(0.5, 0.5)]  # further pairs do not change the result
    resampling = Resampling(2, 100, 20_000)
    found = resampling.stratified_randomisation([a, b, other], [(0, 1), (2, 1), (0, 2)], mean_metric)
    assert found[0] == pytest.approx(exact, abs=0.01)
    assert found[0] == resampling.stratified_randomisation([a, b], [(0, 1)], mean_metric)[0]


def test_the_example_of_multeval_has_its_printed_digits() -> None:
    """Reproduces the table in the README of MultEval 0.5.1: 2,489 sentences, three outputs of each system.

    multeval.npz holds sacreBLEU 2.6's counts for these outputs: lengths, matches of BLEU's n-grams and edits of TER.
    """
    with np.load(Path(__file__).with_name("multeval.npz")) as file:
        arrays = {name: file[name].astype(np.int64) for name in file.files}
    reference = arrays["reference_length"]

    def statistics(output: Counts) -> dict[str, Counts]:
        length, matches, edits = output[:, 0], output[:, 1:5], output[:, 5]
        totals = np.maximum(length[:, None] - np.arange(4), 0)
        return {
            "bleu": np.column_stack([length, reference, matches, totals]),
            "ter": np.column_stack([edits, reference]),
        }

    resampling = Resampling(len(reference), 1000, 1000)
    systems = [[statistics(output) for output in arrays[name]] for name in ("baseline", "system_1")]
    printed = {  # metric -> mean, s_sel and s_opt of each system
        "bleu": [("18.5", "0.3", "0.1"), ("18.8", "0.3", "0.3")],
        "ter": [("65.7", "0.4", "0.2"), ("64.8", "0.4", "0.6")],
    }
    for metric, expected in printed.items():
        outputs = [[output[metric] for output in system] for system in systems]
        found = []
        for system in outputs:
            scores = [corpus_score(output, metric) for output in system]
            spread = resampling.bootstrap(system, metric).std(1, ddof=1).mean()
            found.append(tuple(f"{value:.1f}" for value in (np.mean(scores), spread, np.std(scores, ddof=1))))
        assert found == expected
        (p,) = resampling.stratified_randomisation(outputs, [(0, 1)], metric)
        assert f"{p:.2f}" == "0.00"
