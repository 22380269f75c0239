"""Systems on several corpora: Demšar's own example, hand-computed tests, and the way from runs to a checked table."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import script
from made_runs import make_run, write
from scipy import stats

from nmt.system.run import EVALUATION, RunDirectory, load_values, save_values

# Demšar (2006), table 6: the ranks of C4.5, C4.5+m, C4.5+cf and C4.5+m+cf by their AUC on 14 data sets.
DEMSAR = [
    *((4, 3, 2, 1), (1, 2, 3, 4), (4, 1, 2, 3), (4, 1, 3, 2), (4, 2, 3, 1), (1, 2.5, 4, 2.5), (3, 2, 4, 1)),
    *((2.5, 2.5, 4, 1), (4, 3, 2, 1), (2.5, 2.5, 2.5, 2.5), (4, 2.5, 1, 2.5), (3, 2, 4, 1), (4, 1, 2, 3), (3, 1, 4, 2)),
]
WORDS = ["aßba", "baßb", "aßbc", "caßb", "aßcc"]
SOUNDS = ["a b a", "b a b", "a b c", "c a b", "a c c"]


@pytest.fixture(scope="module")
def corpora() -> ModuleType:
    return script("corpora")


def test_the_example_of_demsar(corpora: ModuleType) -> None:
    ranks = np.array(DEMSAR)
    assert ranks.mean(0) == pytest.approx([3.143, 2.0, 2.893, 1.964], abs=5e-4)  # the averages that he prints
    result = corpora.friedman(ranks)
    # His 9.28 is not corrected for ties: three pairs and one group of four, each of t values, of 14 rows of 4.
    ties = 1 - (3 * (2**3 - 2) + (4**3 - 4)) / (14 * (4**3 - 4))
    assert result["chi2"] * ties == pytest.approx(9.28, abs=5e-3)
    assert corpora.iman_davenport(result["chi2"] * ties, 14, 4) == pytest.approx(3.69, abs=5e-3)
    assert result["critical_difference"] == pytest.approx(1.25, abs=5e-3)
    assert result["p"] == pytest.approx(stats.f.sf(result["f"], 3, 39))


def test_equal_ranks_on_all_corpora_leave_no_doubt(corpora: ModuleType) -> None:
    result = corpora.friedman(np.array([[1.0, 2.0, 3.0]] * 4))
    assert result["chi2"] == pytest.approx(8)  # N (k - 1), the largest value
    assert result["f"] == np.inf
    assert result["p"] == 0


@pytest.mark.parametrize("differences", [(3, -1, 2, 5, -4, 6), (1, -1, 2, 2, 0, 3, -2, 0), (0, 0, 0, 0, 0, 0)])
def test_signed_ranks_are_tested_exactly_with_ties_and_zeros(corpora: ModuleType, differences: tuple[int, ...]) -> None:
    (p,) = corpora.signed_rank(np.array([differences], float))
    expected = 1.0
    if any(differences):
        method = stats.PermutationMethod(n_resamples=2 ** len(differences))
        expected = stats.wilcoxon(differences, method=method).pvalue
    assert p == pytest.approx(expected)


def test_pairs_are_counted_and_corrected(corpora: ModuleType) -> None:
    errors = np.array([[1.0, 2.0, 2.0]] * 5)
    first, second = corpora.tested(["best", "b", "c"], errors, [(1, 0), (1, 2)])
    assert first == {"system": "b", "baseline": "best", "better": 0, "worse": 5, "p_raw": 2 / 2**5, "p": 4 / 2**5}
    assert second == {"system": "b", "baseline": "c", "better": 0, "worse": 0, "p_raw": 1.0, "p": 1.0}


def make_study(folder: Path) -> None:
    """Write runs of three systems on three corpora, whose first N outputs are wrong in one symbol."""
    wrong = {  # by system and seed, on aa, bb and cc
        ("bahdanau", 1): (1, 2, 3),
        ("bahdanau", 2): (1, 1, 1),
        ("luong_dot", 1): (3, 2, 4),
        ("none", 1): (5, 5, 5),
        ("hard", 1): (0,),  # has no runs on bb and cc
    }
    for (system, seed), numbers in wrong.items():
        for corpus, number in zip(("aa", "bb", "cc"), numbers, strict=False):
            outputs = [f"{line[:-1]}x" if row < number else line for row, line in enumerate(SOUNDS)]
            path = folder / f"{corpus}_{system}_{seed}"
            run = RunDirectory(make_run(path, outputs, "experiment=g2p", f"attention={system}", gold=False))
            values = load_values(run.config)
            values["seed"], values["data"]["train"] = seed, [f"/home/me/{corpus}_train.tsv"]
            save_values(run.config, values)
            write(run.data / "test.source", WORDS)
            write(run.data / "test.target", [f"{line} {corpus}" for line in SOUNDS])
            write(run.hypotheses / "test.txt", [f"{line} {corpus}" for line in outputs])
            run.results.write_text(json.dumps({"test": {"wer": 20.0 * number, "ser": 5.0 * number}}))


def test_runs_become_a_table_that_is_checked_without_any_text(
    corpora: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, kept = tmp_path / "study", tmp_path / "kept"
    make_study(study)

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["corpora", *words])
        return corpora.main(), "".join(capsys.readouterr())

    status, printed = call("pack", str(study), str(kept))
    assert status == 0
    assert "13 runs checked, 0 scores differ" in printed
    packed = {file.name: file.read_bytes() for file in kept.iterdir()}
    assert packed.keys() == {"aa.npz", "bb.npz", "cc.npz"}
    with np.load(kept / "aa.npz", allow_pickle=False) as arrays:
        record = arrays["record"].tobytes().decode()
        assert arrays["test/ser"].shape == (5, 2, 5)  # runs, statistics, words
    assert "/home" not in record
    assert not any(word in record for word in (*WORDS, *SOUNDS))
    assert call("pack", str(study), str(kept))[0] == 0
    assert {file.name: file.read_bytes() for file in kept.iterdir()} == packed  # packed runs are kept

    status, printed = call("table", str(kept), "--baseline", "none")
    assert status == 0
    assert "Left out, for lack of runs: `hard`." in printed
    written = kept / "comparison"
    assert {path.name for path in written.iterdir()} == {"comparison.json"} | {
        f"{metric}{end}" for metric in ("wer", "ser") for end in (".md", "_ranks.svg")
    }
    wer, ser = json.loads((written / "comparison.json").read_text())["comparisons"]
    best, second, last = wer["systems"]
    assert (best["name"], second["name"], last["name"]) == ("bahdanau", "luong_dot", "none")
    assert best["scores"] == {"aa": 20.0, "bb": 30.0, "cc": 40.0}  # means of two seeds
    assert best["mean"] == pytest.approx(30)
    assert (best["rank"], second["rank"], last["rank"]) == (1, 2, 3)
    assert best["seeds"] == 2
    assert best["sd"] == pytest.approx(np.std([40, 20], ddof=1))  # of the seeds' mean over the corpora
    assert second["sd"] is None
    assert ser["systems"][0]["mean"] == pytest.approx(7.5)
    assert [row["better"] for row in wer["differences"]] == [3, 3]
    assert call("check", str(kept)) == (
        0,
        f"13 runs checked, 0 scores differ\n{written / 'comparison.json'}: 0 figures differ\n",
    )

    (written / "comparison.json").write_text(
        (written / "comparison.json").read_text().replace('"mean": 30.0', '"mean": 29.0')
    )
    status, printed = call("check", str(kept))
    assert status == 1
    assert "[0].systems[0].mean is 29.0, the runs give 30.0" in printed
    with np.load(kept / "bb.npz", allow_pickle=False) as arrays:
        values = dict(arrays)
    values["test/wer"][0, 0] = 1  # all words of a run are wrong
    np.savez(kept / "bb.npz", **values)
    assert "bahdanau_1: test wer is 40.0, its statistics give 100.0000" in call("check", str(kept))[1]
    assert call("table", str(kept), "--baseline", "nne")[0] == 2
    assert call("table", str(kept), "--split", "validation")[0] == 2


def test_an_ensemble_is_a_system(corpora: ModuleType, tmp_path: Path) -> None:
    study, kept = tmp_path / "study", tmp_path / "kept"
    make_study(study)
    for corpus in ("aa", "bb", "cc"):
        members = [study / f"{corpus}_bahdanau_{seed}" for seed in (1, 2)]
        folder = RunDirectory(study / f"{corpus}_both")
        folder.path.mkdir()
        asked = {"attention": "bahdanau", "ensemble": 2, "data.train": f"/home/me/{corpus}_train.tsv"}
        scoring = {"tokenize": "13a", "lowercase": False, "metrics": ["wer", "ser"]}
        folder.update_json(
            folder.path / EVALUATION,
            {"members": [str(path) for path in members], "choices": asked, "parameters": 7, "evaluation": scoring},
        )
        for name in ("data", "hypotheses"):
            (folder.path / name).mkdir()
            for file in (members[0] / name).iterdir():
                (folder.path / name / file.name).write_bytes(file.read_bytes())
        folder.update_json(folder.results, json.loads((members[0] / "results.json").read_text()))
    assert corpora.pack(study, kept) == 0
    comparison = corpora.compared(kept, "test", "wer", None)
    ensemble = next(row for row in comparison["systems"] if row["name"] == "bahdanau ensemble=2")
    assert ensemble["scores"] == {"aa": 20.0, "bb": 40.0, "cc": 60.0}
    assert ensemble["parameters"] == 7
    record = json.dumps(corpora.unpack(kept / "aa.npz")["aa_both"].record)
    assert "/home" not in record
    assert str(tmp_path) not in record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: write(run.data / "test.target", ["a a a aa", *SOUNDS[1:]]), "line 1 of the references"),
        (lambda run: run.results.write_text('{"test": {"wer": 20.0}, "validation": {"wer": 1.0}}'), "validation"),
    ],
)
def test_runs_of_a_corpus_share_its_text(
    corpora: ModuleType, tmp_path: Path, change: Callable[[RunDirectory], None], message: str
) -> None:
    make_study(tmp_path / "study")
    change(RunDirectory(tmp_path / "study" / "bb_none_1"))
    with pytest.raises(corpora.UserError, match=message):
        corpora.pack(tmp_path / "study", tmp_path / "kept")


def test_too_few_corpora_have_a_table_without_tests(corpora: ModuleType, tmp_path: Path) -> None:
    make_study(tmp_path / "study")
    assert corpora.pack(tmp_path / "study", tmp_path / "kept") == 0
    (tmp_path / "kept" / "cc.npz").unlink()
    assert corpora.table(tmp_path / "kept", "test", "none") == 0
    assert {path.name for path in (tmp_path / "kept" / "comparison").iterdir()} == {
        "comparison.json",
        "wer.md",
        "ser.md",
    }
    comparison = corpora.compared(tmp_path / "kept", "test", "wer", "none")
    assert [row["mean"] for row in comparison["systems"]] == [25, 50, 100]
    assert (comparison["friedman"], comparison["differences"], comparison["pairs"]) == (None, [], [])
