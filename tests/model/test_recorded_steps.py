"""Recorded steps of beam search give the same hypotheses, with a stand-in for CUDA graphs that computes on the CPU."""

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
import yaml
from small_models import BOS, EOS, LENGTHS, PAD, SOURCE, attention, model_of
from test_model import COMBINATIONS, EVERY, label
from torch import Tensor

from nmt.config.compose import config_dir
from nmt.config.schema import training as schema
from nmt.translate.beam import BeamSearch, Coverage, Scorer, Selection, beam_search
from nmt.translate.expansion import AHEAD
from nmt.translate.prepared_model import SearchModel
from nmt.translate.search import Follower, Hypothesis, Limits, SearchBatch, Symbols

T = TypeVar("T")
LIMITS = Limits(2 * AHEAD + 3, [3 * AHEAD + 3, 1, 9], [[], [], [5, 6]])  # of three sentences, in four launches


class Repeating:
    """Stands in for the recorder of CUDA graphs: each launch does the recorded work again."""

    def __init__(self, error: Exception | None = None) -> None:
        self.usable, self.error, self.recorded, self.launched = True, error, 0, 0

    def compute(self, work: Callable[[], T]) -> T:
        return work()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        if self.error is not None:
            raise self.error
        self.recorded += 1

        def launch() -> None:
            self.launched += 1
            work()

        return None, launch  # type: ignore[return-value]

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        copied = tensor.clone()
        return lambda: copied


def batch_of(changes: dict[str, Any], limits: Limits = LIMITS) -> SearchBatch[Any]:
    """Make a batch for a model whose probabilities differ clearly, so that rounding cannot change a beam."""
    model = model_of(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    prepared = SearchModel(model, 3, lambda weight, bounded=False: weight)
    state = prepared.encode(SOURCE, LENGTHS)
    return SearchBatch(prepared.step, state, Symbols(BOS, EOS, (PAD, BOS)), limits, torch.device("cpu"))


def assert_same(results: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for sentence, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert [each.tokens for each in ours] == [each.tokens for each in theirs], sentence
        for hypothesis, other in zip(ours, theirs, strict=True):
            assert hypothesis.score == pytest.approx(other.score, abs=1e-5)
            assert hypothesis.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-5)
            assert (hypothesis.attention is None) == (other.attention is None)
            if hypothesis.attention is not None and other.attention is not None:
                torch.testing.assert_close(hypothesis.attention, other.attention, rtol=1e-4, atol=1e-5)


def search(batch: SearchBatch[Any], recorder: Repeating | None, beam_size: int = 3, **options: Any) -> Any:  # noqa: ANN401
    options = {"scorer": Scorer("average", 1.0), **options}
    return beam_search(batch, Selection(beam_size, EOS), beam_size, recorder=recorder, **options)


QUICK = [case for case in EVERY if not case.marks][::4]
CASES = [case if case in QUICK else pytest.param(*case.values, marks=pytest.mark.slow) for case in EVERY]


@pytest.mark.parametrize("changes", CASES, ids=label)
def test_the_hypotheses_are_those_of_single_steps(changes: dict[str, Any]) -> None:
    if changes.get("attention", {}).get("window", {}).get("kind") == "local_m":
        pytest.skip("counts its steps")
    recorder, batch = Repeating(), batch_of(changes)
    expected = search(batch, None)
    assert_same(search(batch, recorder), expected)
    assert recorder.recorded == 1
    assert recorder.launched >= max(len(hypothesis.tokens) for nbest in expected for hypothesis in nbest) - 2


@pytest.mark.parametrize("limits", [Limits(0, [1, 2, 3]), Limits(0, [30, 30, 30]), Limits(1, [12, 7, 20])])
@pytest.mark.parametrize("stop", ["beam", "exact"])
@pytest.mark.parametrize("beam_size", [1, 5, 20])  # 20: more hypotheses than tokens
def test_limits_stops_and_widths(limits: Limits, stop: str, beam_size: int) -> None:
    batch = batch_of({"attention": attention("dot")}, limits)
    assert_same(search(batch, Repeating(), beam_size, stop=stop), search(batch, None, beam_size, stop=stop))


def test_a_sentence_that_has_ended_gets_no_other_hypotheses() -> None:
    longer_is_better = Scorer("average", 5.0)
    batch = batch_of(COMBINATIONS[11], Limits(0, [30, 30, 30]))
    expected = search(batch, None, scorer=longer_is_better)
    longest = [max(len(hypothesis.tokens) for hypothesis in nbest) for nbest in expected]
    assert min(longest) < AHEAD  # K hypotheses have ended, although longer ones would score higher
    assert max(longest) == 30
    assert_same(search(batch, Repeating(), scorer=longer_is_better), expected)


def test_with_a_coverage_penalty() -> None:
    batch = batch_of({"attention": attention("additive")})
    results = [
        search(batch, recorder, scorer=Coverage(Scorer("gnmt", 0.6), 2.0, LENGTHS.tolist()))
        for recorder in (Repeating(), None)
    ]
    assert_same(*results)


def test_what_cannot_be_recorded_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    batch, recorder = batch_of({"attention": attention("dot")}), Repeating(RuntimeError("not permitted\nmore"))
    with caplog.at_level(logging.WARNING, "nmt"):
        assert_same(search(batch, recorder), search(batch, None))
    assert not recorder.usable
    assert caplog.messages == ["beam search runs without CUDA graphs (search.cuda_graphs): not permitted"]


def test_an_error_for_want_of_memory_is_raised() -> None:
    recorder = Repeating(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        search(batch_of({"attention": attention("dot")}), recorder)
    assert recorder.usable


def test_the_end_of_a_search_frees_its_batch() -> None:
    batch = batch_of({"attention": attention("dot")})
    memory = weakref.ref(batch.state.source.memory.values)
    gc.disable()
    try:
        search(batch, Repeating())
        del batch
        assert memory() is None  # no reference cycle keeps it
    finally:
        gc.enable()


def test_only_plain_searches_are_recorded() -> None:
    values = yaml.safe_load((config_dir() / "search" / "beam.yaml").read_text())
    values |= yaml.safe_load((config_dir() / "search" / "_limits.yaml").read_text())
    settings = schema.Beam(**{key: value for key, value in values.items() if key != "defaults"})
    recorder = Repeating()
    batch = replace(batch_of({"attention": attention("dot")}), recorder=recorder, lengths=LENGTHS.tolist())
    BeamSearch(settings)(replace(batch, rules=[lambda _: Follower()]), 1)
    BeamSearch(settings)(replace(batch, selection=Other), 1)
    BeamSearch(settings.model_copy(update={"cuda_graphs": False}))(batch, 1)
    assert recorder.recorded == 0
    BeamSearch(settings)(batch, 1)
    assert recorder.recorded == 1


class Other(Selection):
    """Chooses as Selection does."""
