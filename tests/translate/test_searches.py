"""Coverage penalty and minimum Bayes risk decoding as users choose them, on small trained runs."""

from pathlib import Path
from typing import Any

import pytest
from trained import LINES, blind, run  # noqa: F401

from nmt import Translator
from nmt.config.errors import UserError
from nmt.evaluate.evaluation import align
from nmt.translate.similarity import Utility, mean_utilities
from nmt.translate.translation import Translation

SAMPLING: dict[str, Any] = {"kind": "sampling", "temperature": 0.7, "top_k": 0, "top_p": 0.95}
MBR = {**SAMPLING, "kind": "mbr", "candidates": "sampling", "n_candidates": 6, "utility": "chrf"}


def nbest(run: Any, n: int, **search: Any) -> list[list[Translation]]:  # noqa: ANN401, F811
    return Translator.load(run, search=search).translate_nbest(LINES, n)


def test_coverage_ranks_by_what_forced_decoding_scores(run: Path, blind: Path) -> None:  # noqa: F811
    short, compared, lowered = {"beam_size": 6, "max_length": 5}, 0, 0  # 5 tokens are too few to cover a long line
    for runs in ([run], [run, blind]):
        translator, plain = (Translator.load(runs, search=short | {"coverage_penalty": b}) for b in (0.7, 0.0))
        for line, found in zip(LINES, translator.translate_nbest(LINES, 6), strict=True):
            assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
            for each in found if found[0].text else []:
                forced = translator.score([line], [each.text])[0]
                if forced.tokens == each.tokens:  # the same text may be split into other pieces
                    compared += 1
                    assert forced.score == pytest.approx(each.score, abs=1e-3)
                    lowered += forced.score < plain.score([line], [each.text])[0].score - 0.01
    assert compared > lowered > 5


@pytest.mark.parametrize(("candidates", "utility"), [("sampling", "chrf"), ("beam", "bleu")])
def test_the_choice_is_the_candidate_most_similar_to_the_others(run: Path, candidates: str, utility: Utility) -> None:  # noqa: F811
    changed = 0
    beam = {"kind": "beam", "beam_size": 6, "length_penalty": "none", "alpha": 0.0}
    drawn = nbest(run, 6, **(SAMPLING if candidates == "sampling" else beam))
    found = nbest(run, 6, **(MBR | {"candidates": candidates, "utility": utility}))
    for of_line, chosen in zip(drawn, found, strict=True):
        if not of_line[0].text:
            continue
        utilities = mean_utilities([each.text for each in of_line], utility)
        assert [each.score for each in chosen] == pytest.approx(sorted(utilities, reverse=True), abs=1e-6)
        best = max(range(len(of_line)), key=lambda i: round(utilities[i], 6))
        assert chosen[0].text == of_line[best].text
        changed += best != 0
    assert changed or candidates == "beam"  # the best hypothesis of a beam is often the most similar one too


def test_candidates_of_equal_text_count_once(run: Path) -> None:  # noqa: F811
    for several, same in zip(nbest(run, 6, **MBR), nbest(run, 5, **(MBR | {"top_k": 1})), strict=True):
        assert len(several) == len({each.text for each in several})
        assert len(same) == 1  # with top_k=1, all candidates are the same
    one, drawn = nbest(run, 1, **(MBR | {"n_candidates": 1})), nbest(run, 1, **SAMPLING)
    assert [(each.text, each.log_prob) for (each,) in one] == [(each.text, each.log_prob) for (each,) in drawn]


def test_coverage_without_attention_is_refused(blind: Path) -> None:  # noqa: F811
    loaded = Translator.load(blind)
    covering = loaded.settings.model_copy(update={"coverage_penalty": 0.1})
    with pytest.raises(UserError, match=r"search.coverage_penalty=0.1: the run has no attention; set it to 0"):
        loaded.with_search(covering)
    assert align(loaded, ["the cat"], ["le chat"], ["0-0 1-1"]) is None


def test_an_empty_line_has_no_tree(run: Path) -> None:  # noqa: F811
    translator = Translator.load(run)
    for attend in (None, {0: 5}):
        (found,), steps = translator.beam_tree("", 1, attend=attend)
        assert (found.text, steps) == ("", [])
