"""Batches: each epoch has every pair once, with little padding, in an order that seed and epoch determine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_config, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.data.batching import Batches, gold_attention, plan
from nmt.data.prepare import prepare
from nmt.data.prepared_corpus import PreparedCorpus

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=200)


@given(LENGTHS, st.integers(1, 300), st.none() | st.integers(1, 20), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_a_plan_covers_every_pair_once_within_its_limits(
    lengths: list[tuple[int, int]], tokens: int, sentences: int | None, seed: int
) -> None:
    source, target = (np.array(side) for side in zip(*lengths, strict=True))
    batches = plan(source, target, batch_tokens=tokens, batch_sentences=sentences, rng=np.random.default_rng(seed))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(source[batch].max(), target[batch].max())
        assert len(batch) == 1 or len(batch) * longest <= tokens
        assert sentences is None or len(batch) <= sentences


def test_a_batch_may_fill_its_budget_to_the_last_token() -> None:
    five = np.full(8, 5)
    batches = plan(five, five, batch_tokens=20, batch_sentences=None, rng=np.random.default_rng(0))
    assert [len(batch) for batch in batches] == [4, 4]


@pytest.fixture(scope="module")
def prepared() -> PreparedCorpus:
    sizes = ["data.train_size=200", "data.validation_size=20", "data.test_size=20", "data.max_length=200"]
    sizes += ["tokenizer.vocab_size=400"]  # a vocabulary with many segmentations of a word
    config = tiny_config(*sizes)
    return prepare(config.data, config.tokenizer)


def batches(prepared: PreparedCorpus, seed: int = 1, **options: Any) -> Batches:  # noqa: ANN401
    sizes: dict[str, Any] = {"batch_tokens": 512, "batch_sentences": None}
    return Batches(prepared.splits["train"], prepared.tokenizers, seed=seed, **sizes, **options)


def order(found: Batches, epoch: int) -> list[list[int]]:
    return [batch.tolist() for batch in found.epoch(epoch)]


def test_the_order_depends_on_seed_and_epoch_alone(prepared: PreparedCorpus) -> None:
    assert order(batches(prepared), 3) == order(batches(prepared), 3)
    assert order(batches(prepared), 3) != order(batches(prepared), 4)
    assert order(batches(prepared), 3) != order(batches(prepared, seed=2), 3)


def test_a_batch_holds_the_pairs_it_names(prepared: PreparedCorpus) -> None:
    found = batches(prepared)
    (batch,) = found.load(found.epoch(0)[0], 0)
    split, (source, target) = prepared.splits["train"], prepared.tokenizers
    for row, index in enumerate(batch.indices.tolist()):
        length = int(batch.lengths[row])
        assert source.decode(batch.source[row].tolist()) == split.source.line(index)
        assert target.decode(batch.target_out[row].tolist()) == split.target.line(index)
        assert batch.source[row, length - 1] == source.eos
        assert (batch.source[row, length:] == source.pad).all()
    real = batch.target_out != target.pad
    assert batch.target_tokens == int(real.sum())
    assert (batch.target_in[:, 0] == target.bos).all()
    assert torch.equal(batch.target_in[:, 1:], batch.target_out[:, :-1])


def test_sampling_draws_anew_each_epoch_and_the_same_for_a_seed(prepared: PreparedCorpus) -> None:
    found = batches(prepared, sampling=(0.3, 0.3))
    indices = found.epoch(0)[0]
    first, again, later = (found.load(indices, epoch)[0] for epoch in (0, 0, 1))
    assert torch.equal(first.source, again.source)
    assert not torch.equal(first.target_out, later.target_out) or not torch.equal(first.source, later.source)
    (plain,) = batches(prepared).load(indices, 0)
    assert first.source.numel() > plain.source.numel()
    texts = [prepared.tokenizers.source.decode(row.tolist()) for row in first.source]
    assert texts == [prepared.splits["train"].source.line(i) for i in indices.tolist()]


def test_one_side_alone_is_sampled(prepared: PreparedCorpus) -> None:
    for overrides, of_source, of_target in (
        (["tokenizer=sides", "tokenizer.source.sampling=0.3"], True, False),
        (["tokenizer=sides", "tokenizer.target.sampling=0.3"], False, True),
        (["tokenizer.sampling=0.3"], True, True),
    ):
        tokenizer = run_config(*overrides).tokenizer
        found = batches(prepared, sampling=tokenizer.sampling_by_side)
        (drawn,), (plain,) = (some.load(found.epoch(0)[0], 0) for some in (found, batches(prepared)))
        assert torch.equal(drawn.source, plain.source) != of_source
        assert torch.equal(drawn.target_out, plain.target_out) != of_target


def test_pairs_are_batched_by_the_lengths_that_are_drawn(prepared: PreparedCorpus) -> None:
    plain, drawn = batches(prepared), batches(prepared, sampling=(0.5, 0.5))
    fresh = drawn.epoch(1)
    assert sorted(i for batch in fresh for i in batch) == list(range(len(prepared.splits["train"])))
    assert sorted(map(len, fresh)) == sorted(map(len, plain.epoch(1)))

    def share_of_padding(plan: Sequence[Any]) -> float:
        loaded = [drawn.load(indices, 1)[0] for indices in plan]
        return 1 - sum(batch.target_tokens for batch in loaded) / sum(batch.target_out.numel() for batch in loaded)

    # `fresh` knows the drawn lengths of both sides, which differ independently from the usual ones.
    assert share_of_padding(fresh) < share_of_padding(plain.epoch(1)) / 2


def prepared_text(folder: Path, lines: list[str], links: str | None, *options: str) -> PreparedCorpus:
    """Prepare a corpus with the same lines on both sides; `links` are the word alignments of each pair."""
    for suffix in ("en", "xx"):
        (folder / f"train.{suffix}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    words = ["data=files", "data.target_lang=xx", "data.train=x", "data.validation=x", *options]
    if links is not None:
        (folder / "train.gold").write_text(f"{links}\n" * len(lines))
        words.append("data.alignments=gold")
    config = run_config(*words)
    prefix = [str(folder / "train")]
    data = config.data.model_copy(update={"train": prefix, "validation": prefix, "cache_dir": str(folder / "cache")})
    return prepare(data, config.tokenizer)


def test_other_word_alignments_of_the_training_set_are_another_corpus(tmp_path: Path) -> None:
    contents = {
        prepared_text(tmp_path, ["a cat sleeps", "a dog sees"] * 20, links, "tokenizer=char").report["content"]
        for links in ("0-0 1-1", "0-1 1-0")
    }
    assert len(contents) == 2


def test_equal_sentences_are_segmented_differently_and_so_are_equal_sides(tmp_path: Path) -> None:
    lines = ["the wonderful yellow house sees the little brown dog"] * 20
    prepared = prepared_text(tmp_path, lines, None, "tokenizer.vocab_size=40")
    (batch,) = batches(prepared, sampling=(0.5, 0.5)).load(np.arange(20), 0)
    assert len({tuple(row) for row in batch.source.tolist()}) > 10
    width = min(batch.source.shape[1], batch.target_out.shape[1])
    assert (batch.source[:, :width] == batch.target_out[:, :width]).all(1).sum() < 5


@pytest.mark.parametrize("sampling", [0.0, 0.5])
def test_alignments_count_words_that_spaces_separate(sampling: float, tmp_path: Path) -> None:
    lines = [f"a\xa0{word} sees\u2003the {word} now" for word in ("cat", "dog", "bird", "house")] * 5
    prepared = prepared_text(tmp_path, lines, "0-0 1-1 2-2 3-3", "tokenizer.vocab_size=40")
    (batch,) = batches(prepared, sampling=(sampling, sampling), guided=True).load(np.arange(4), 0)
    assert batch.alignment is not None
    real = batch.target_out != prepared.tokenizers.target.pad
    assert torch.equal(batch.alignment.sum(-1) > 0, real)  # every target token is linked


# Gold alignments of words, converted to attention over tokens


@pytest.mark.parametrize(
    ("links", "source", "target", "expected"),
    [
        ("0-0 1-1", "▁the ▁ca t </s>", "▁le ▁ch at </s>", [[2, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 2]]),
        ("0p0", "▁no </s>", "▁non </s>", [[2, 0], [0, 2]]),
        ("", "▁no </s>", "▁non </s>", [[0, 0], [0, 2]]),
        ("0-0 1-0", "▁a ▁b </s>", "▁x </s>", [[1, 1, 0], [0, 0, 2]]),  # several words share a row
        ("0-0 7-0 0-9 1-0 0-1", "▁a </s>", "▁x </s>", [[2, 0], [0, 2]]),  # links beyond what the tokenizer left
    ],
)
def test_links_of_words_spread_over_their_pieces(
    links: str, source: str, target: str, expected: list[list[int]]
) -> None:
    """`expected` is twice the attention. A longer sentence beside it adds padding, where all is zero."""
    longer = [*source.split(), "</s>"], [*target.split(), "</s>"]
    found, _ = gold_attention([links, ""], [source.split(), longer[0]], [target.split(), longer[1]])
    padded = [[*row, 0] for row in expected] + [[0] * (len(expected[0]) + 1)]
    assert (2 * found).tolist() == padded
