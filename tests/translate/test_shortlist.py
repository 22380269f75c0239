"""Shortlists from counts of translations, the shortlist of a run, and searches with a shortlist."""

import json
from pathlib import Path

import numpy as np
import pytest
from forks import call
from safetensors.numpy import save_file
from trained import LINES
from trained import run as trained_run  # noqa: F401

from nmt import Translator
from nmt.config.errors import UserError
from nmt.system.run import RunDirectory, load_config
from nmt.translate.shortlist import Shortlist, load_or_make_shortlist, translation_counts
from nmt.translate.steps import BLOCK


@pytest.fixture(scope="module")
def run(trained_run: Path) -> RunDirectory:  # noqa: F811
    return RunDirectory(trained_run)


SOURCE, TARGET = 6, 1000
SPECIAL = [0, 1, 2, 3]
COUNTS = {(4, 10): 5.0, (4, 11): 3.0, (4, 12): 2.0, (4, 900): 0.1, (5, 13): 1.0, (5, 10): 4.0, (5, 999): 2.0}


def shortlist(per_token: int = 2, frequent: int = 1) -> Shortlist:
    pairs = np.array([s * TARGET + t for s, t in COUNTS])
    return Shortlist.from_counts(pairs, np.array(list(COUNTS.values())), (SOURCE, TARGET), SPECIAL, per_token, frequent)


def test_has_special_and_frequent_tokens_and_the_likeliest_translations() -> None:
    made = shortlist()
    assert made.of([]).tolist() == [0, 1, 2, 3, 10]  # 10 is the most frequent token
    assert made.of([4]).tolist() == [0, 1, 2, 3, 10, 11, 12]  # 11 and 12 are the two likeliest translations of 4
    assert made.of([4, 5, 4]).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 999]
    assert shortlist(per_token=1).of([5]).tolist() == [0, 1, 2, 3, 10, 999]
    assert shortlist(per_token=5).of([4]).tolist() == [0, 1, 2, 3, 10, 11, 12]  # 900 is too rare a translation


def test_a_vocabulary_is_that_of_all_sentences_in_whole_blocks() -> None:
    ids = shortlist().vocabulary([[4], [5]], [777])
    assert ids is not None
    assert len(ids) == BLOCK
    assert (np.diff(ids) > 0).all()
    assert {777, *shortlist().of([4, 5])} <= set(ids.tolist())


def model_1(pairs: list[tuple[list[int], list[int]]], iterations: int) -> dict[tuple[int, int], float]:
    """Train IBM Model 1 word by word: (source token, target token) -> expected count."""
    probs = dict.fromkeys(((s, t) for source, target in pairs for s in source for t in target), 1.0)
    counts: dict[tuple[int, int], float] = {}
    for _ in range(iterations):
        counts = dict.fromkeys(probs, 0.0)
        for source, target in pairs:
            for t in target:
                total = sum(probs[s, t] for s in source)
                for s in source:
                    counts[s, t] += probs[s, t] / total
        of_source = {s: sum(c for (other, _), c in counts.items() if other == s) for s, _ in counts}
        probs = {(s, t): count / of_source[s] for (s, t), count in counts.items()}
    return counts


def test_expected_counts_are_those_of_model_1() -> None:
    draw, lengths = np.random.default_rng(0), [(3, 4), (1, 2), (5, 2), (4, 6)]
    pairs = [(draw.integers(0, 7, n).tolist(), draw.integers(0, 9, m).tolist()) for n, m in lengths]
    keys, counts = translation_counts([np.array(s) for s, _ in pairs], [np.array(t) for _, t in pairs], (7, 9), 4)
    assert dict(zip(zip(*divmod(keys, 9), strict=True), counts, strict=True)) == pytest.approx(model_1(pairs, 4))


def test_is_made_once_and_knows_translations(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 95 % of the tokens of the demo corpus's translations are in the shortlist of their sentence."""
    config, path = load_config(run.config), run.path / "shortlist.safetensors"
    first = load_or_make_shortlist("auto", run, config)
    monkeypatch.setattr("nmt.translate.shortlist.prepare", None)  # fails if the shortlist is made again
    for value in ("auto", str(path)):
        np.testing.assert_equal(load_or_make_shortlist(value, run, config).arrays(), first.arrays())
    tokenizers, (sources, targets, _) = Translator.load(run.path).tokenizers, run.held_out("test")
    pairs = zip(tokenizers.source.encode(sources), tokenizers.target.encode(targets), strict=True)
    assert np.mean([token in first.of(source) for source, target in pairs for token in target]) > 0.95


@pytest.mark.parametrize(
    "search", [{}, {"kind": "greedy"}, {"kind": "sampling", "temperature": 1.0, "top_k": 0, "top_p": 1.0}]
)
def test_a_list_of_nearly_all_tokens_changes_nothing(
    run: RunDirectory, search: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search numbers tokens within the list, and must convert them back."""
    plain, listed = (Translator.load(run.path, search=search, precision="fp32") for _ in range(2))
    for each in (plain, listed):  # makes one token nearly impossible; the list leaves it out
        each.single.output.bias.data[each.tokenizers.target.unk] = -1e4
    target = listed.tokenizers.target
    listed.shortlist = shortlist = listing(listed, [i for i in range(target.vocab_size) if i != target.unk])
    monkeypatch.setattr(shortlist, "vocabulary", lambda *_: shortlist.always)
    for one, other in zip(plain.translate(LINES), listed.translate(LINES), strict=True):
        assert one.text == other.text
        assert one.tokens == other.tokens


def listing(translator: Translator, ids: list[int]) -> Shortlist:
    """Make a shortlist of the same tokens for every sentence."""
    source, target = translator.tokenizers
    return Shortlist(np.zeros(0, np.int64), np.zeros(source.vocab_size, np.int64), np.array(ids), target.vocab_size)


def test_a_search_uses_no_other_tokens(run: RunDirectory) -> None:
    translator = Translator.load(run.path)
    target = translator.tokenizers.target
    ids = sorted([target.pad, target.unk, target.bos, target.eos, *range(10, 70)])
    translator.shortlist = listing(translator, ids)
    allowed = {target.pieces([int(i)])[0] for i in ids}
    for translation in translator.translate(LINES):
        assert set(translation.tokens) <= allowed
    start = target.pieces([next(i for i in range(70, target.vocab_size) if target.pieces([i])[0].isalpha())])
    for translation in translator.translate([line for line in LINES if line], prefix=start):
        assert translation.tokens[:1] == start


def test_damaged_and_foreign_files_are_one_line(run: RunDirectory, tmp_path: Path) -> None:
    config = load_config(run.config)
    whole = load_or_make_shortlist("auto", run, config)
    (tmp_path / "damaged").write_bytes((run.path / "shortlist.safetensors").read_bytes()[:-8])
    other = {**whole.arrays(), "ends": whole.ends[:-1], "candidates": whole.candidates[: whole.ends[-2]]}
    save_file(other, tmp_path / "other")
    for name, message in (
        ("damaged", "shortlist=.*damaged is not a shortlist of this vocabulary"),
        ("none", "cannot be read"),
        ("other", "belongs to another source vocabulary"),
    ):
        with pytest.raises(UserError, match=message):
            load_or_make_shortlist(str(tmp_path / name), run, config)


def test_an_evaluation_with_it_stands_beside_the_run_s_own(run: RunDirectory, tmp_path: Path) -> None:
    file, own = tmp_path / "few", json.loads(run.results.read_bytes())
    save_file(listing(Translator.load(run.path), [*range(100)]).arrays(), file)
    listed = call("nmt-evaluate", f"run={run.path}", "split=validation", f"shortlist={file}")
    assert listed.returncode == 0, listed.stderr
    results = json.loads(run.results.read_bytes())
    (added,) = results.keys() - own.keys()
    assert results == {**own, added: results[added]}
