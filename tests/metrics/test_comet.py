"""COMET by a package that stands in for unbabel-comet; means of sentence scores are tested as brute force says."""

import itertools
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from nmt.metrics import comet as comet_module
from nmt.metrics.bleu import ScoreSettings
from nmt.metrics.comet import Comet
from nmt.metrics.significance import Significance, compare_means

HUB = "Unbabel/wmt22-comet-da"
CPU = torch.device("cpu")


def test_scores_are_in_the_order_of_the_sentences(comet_package: Path) -> None:
    sources = [f"{'w ' * (n * 7 % 40)}x" for n in range(40)]  # of different lengths, so that batches reorder them
    references = [f"a b c {n}" for n in range(40)]
    hypotheses = [line if n % 3 else f"{line} d" for n, line in enumerate(references)]
    done: list[int] = []
    scores = Comet.load(HUB, CPU)(sources, hypotheses, references, done.append)
    assert scores == pytest.approx([1.0 if n % 3 else 0.8 for n in range(40)])
    assert sum(done) == 40


def test_a_checkpoint_is_a_file_and_a_name_is_of_the_hub(comet_package: Path, tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_text("comet")
    assert Comet.load(str(tmp_path / "model.ckpt"), CPU)(["s"], ["a"], ["a"]) == [1.0]
    (tmp_path / "damaged.ckpt").write_text("no")
    for name, message in {
        str(tmp_path / "absent.ckpt"): "no such file; give the checkpoint of a COMET model",
        str(tmp_path / "damaged.ckpt"): r"cannot be loaded \(PytorchStreamReader failed\); is it a COMET model\?",
        "Unbabel/absent": r"cannot be loaded \(.*not supported by COMET.*\); check the name and the network",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            Comet.load(name, CPU)
        assert "\n" not in str(caught.value)


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comet_module, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r'COMET needs another package: pip install "nmt\[comet\]"'):
        Comet.load(HUB, CPU)


SCORES = np.array([0.9, 0.4, 0.7, 0.8, 0.3])
BASE = np.array([0.7, 0.5, 0.5, 0.6, 0.3])


def test_p_values_are_those_of_all_resamples_and_all_signs() -> None:
    differences = SCORES - BASE
    observed = abs(differences.mean())
    resampled = [differences[list(drawn)].mean() for drawn in itertools.product(range(5), repeat=5)]
    signed = [(differences * signs).mean() for signs in itertools.product((-1, 1), repeat=5)]
    exact = [
        np.mean([abs(mean - shift) >= observed - 1e-12 for mean in means])
        for means, shift in ((resampled, differences.mean()), (signed, 0.0))
    ]
    found = compare_means(SCORES.tolist(), BASE.tolist(), 20_000, 20_000)
    assert found.score == pytest.approx(SCORES.mean())
    assert [found.p_bootstrap, found.p_randomisation] == pytest.approx(exact, abs=0.01)
    means = [SCORES[list(drawn)].mean() for drawn in itertools.product(range(5), repeat=5)]
    low, high = np.quantile(means, [0.025, 0.975])
    assert found.interval == pytest.approx((high - low) / 2, abs=0.005)


def test_nothing_is_certain_of_equal_scores_or_a_single_difference() -> None:
    equal = compare_means(BASE.tolist(), BASE.tolist(), 500, 500)
    assert (equal.p_bootstrap, equal.p_randomisation) == (1.0, 1.0)
    scores = np.random.default_rng(0).random(30)
    one = scores.copy()
    one[3] += 0.1
    assert compare_means(one.tolist(), scores.tolist(), 500, 500).p_randomisation == 1.0  # both signs are as large
    alone = compare_means(BASE.tolist(), None, 500, 500)
    assert (alone.p_bootstrap, alone.p_randomisation) == (None, None)


def test_the_seed_is_that_of_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    def p_values() -> tuple[float | None, ...]:
        return compare_means(SCORES.tolist(), BASE.tolist(), 300, 300)[2:]

    first = p_values()
    assert p_values() == first
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    assert p_values() != first


def test_sentence_metrics_join_the_others_and_score_an_output_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    scored: list[list[str]] = []

    def length(output: list[str]) -> list[float]:
        scored.append(output)
        return [float(len(line)) for line in output]

    references = ["a b c d e", "f g h i j"] * 10
    better = ["a b c d e f", *references[1:]]
    plain = Significance(references, ScoreSettings("13a", False), 100, 100)
    significance = Significance(references, ScoreSettings("13a", False), 100, 100, {"length": length})
    for _ in range(2):
        base, other = significance(references, [better])
    assert len(scored) == 2
    assert other["length"] == compare_means(length(better), length(references), 100, 100)
    assert significance.score(better, "length") == pytest.approx(9.1)
    assert [{name: result[name] for name in ("bleu", "chrf", "ter")} for result in (base, other)] == plain(
        references, [better]
    )
