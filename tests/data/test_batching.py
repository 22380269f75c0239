"""Batches: every pair once, little padding, an order from seed and epoch alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig
from nmt.data import batching as planning
from nmt.data.batching import Batches, plan
from nmt.data.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.data.tokenizer import Tokenizer

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


def test_batches_are_full_and_even() -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(5, 40, 5000)
    target = np.maximum(1, source + rng.integers(-3, 4, 5000))
    batches = plan(source, target, batch_tokens=2000, batch_sentences=None, rng=rng)
    padded = sum(len(batch) * target[batch].max() for batch in batches)
    assert target.sum() / padded > 0.97
    fill = [len(batch) * max(source[batch].max(), target[batch].max()) / 2000 for batch in batches]
    assert np.median(fill) > 0.95


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest) -> Prepared:
    from conftest import TINY, values_of

    sizes = [
        "data.train_size=200",
        "data.validation_size=20",
        "data.test_size=20",
        "data.max_length=200",
        "data.seed=1",
    ]
    sizes += ["tokenizer.vocab_size=400"]  # many ways to segment
    config = validated(TrainConfig, values_of("train", [*TINY, *sizes]))
    return prepare(config.data, config.tokenizer)


def batches(
    prepared: Prepared, seed: int = 1, sampling: tuple[float, float] = (0.0, 0.0), guided: bool = False
) -> Batches:
    return Batches(
        prepared.splits["train"],
        prepared.tokenizers,
        batch_tokens=512,
        batch_sentences=None,
        seed=seed,
        sampling=sampling,
        guided=guided,
    )


def order(found: Batches, epoch: int) -> list[list[int]]:
    return [batch.tolist() for batch in found.epoch(epoch)]


def test_the_order_depends_on_seed_and_epoch_alone(prepared: Prepared) -> None:
    assert order(batches(prepared), 3) == order(batches(prepared), 3)
    assert order(batches(prepared), 3) != order(batches(prepared), 4)
    assert order(batches(prepared), 3) != order(batches(prepared, seed=2), 3)


def test_a_batch_holds_the_pairs_it_names(prepared: Prepared) -> None:
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


def test_sampling_draws_anew_each_epoch_and_the_same_for_a_seed(prepared: Prepared) -> None:
    found = batches(prepared, sampling=(0.3, 0.3))
    indices = found.epoch(0)[0]
    first, again, later = (found.load(indices, epoch)[0] for epoch in (0, 0, 1))
    assert torch.equal(first.source, again.source)
    assert not torch.equal(first.target_out, later.target_out) or not torch.equal(first.source, later.source)
    (plain,) = batches(prepared).load(indices, 0)
    assert first.source.numel() > plain.source.numel()
    texts = [prepared.tokenizers.source.decode(row.tolist()) for row in first.source]
    assert texts == [prepared.splits["train"].source.line(i) for i in indices.tolist()]


def test_one_side_alone_is_sampled(prepared: Prepared) -> None:
    from conftest import TINY, values_of

    for sides, of_source, of_target in (("source", True, False), ("target", False, True), ("both", True, True)):
        given = [*TINY, "tokenizer.sampling=0.3", f"tokenizer.sampling_sides={sides}"]
        sampling = validated(TrainConfig, values_of("train", given)).tokenizer.sampling_by_side
        found = batches(prepared, sampling=sampling)
        (drawn,), (plain,) = (each.load(found.epoch(0)[0], 0) for each in (found, batches(prepared)))
        assert torch.equal(drawn.source, plain.source) != of_source
        assert torch.equal(drawn.target_out, plain.target_out) != of_target


def test_pairs_are_batched_by_the_lengths_that_are_drawn(prepared: Prepared) -> None:
    plain, drawn = batches(prepared), batches(prepared, sampling=(0.5, 0.5))
    fresh = drawn.epoch(1)
    assert sorted(i for batch in fresh for i in batch) == list(range(len(prepared.splits["train"])))
    assert sorted(map(len, fresh)) == sorted(map(len, plain.epoch(1)))

    def share_of_padding(plan: Sequence[Any]) -> float:
        loaded = [drawn.load(indices, 1)[0] for indices in plan]
        return 1 - sum(batch.target_tokens for batch in loaded) / sum(batch.target_out.numel() for batch in loaded)

    assert share_of_padding(fresh) < share_of_padding(plain.epoch(1)) / 2  # the sides vary independently


def test_each_pair_is_drawn_with_its_own_seed(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def recorded(self: Tokenizer, lines: Sequence[str], alpha: float, seeds: Sequence[int]) -> list[list[int]]:
        seen.append(tuple(seeds))
        return self.encode(lines)

    monkeypatch.setattr(Tokenizer, "sample", recorded)
    found = batches(prepared, sampling=(0.3, 0.0))
    for epoch in (0, 1):
        found.load(np.arange(20), epoch)
    first, second = seen
    assert len({*first}) == len({*second}) == 20
    assert first != second


def test_other_word_alignments_of_the_training_set_are_another_corpus(tmp_path: Path) -> None:
    from conftest import values_of

    for suffix in ("en", "xx"):
        (tmp_path / f"train.{suffix}").write_text("a cat sleeps\na dog sees\n" * 20)
    files = [f"data.{name}={tmp_path}/train" for name in ("train", "validation")]
    words = ["data=files", "data.target_lang=xx", *files, f"data.cache_dir={tmp_path}/cache", "tokenizer=char"]
    config = validated(TrainConfig, values_of("train", [*words, "data.alignments=gold"]))
    contents = []
    for links in ("0-0 1-1\n", "0-1 1-0\n"):
        (tmp_path / "train.gold").write_text(links * 40)
        contents.append(prepare(config.data, config.tokenizer).report["content"])
    assert contents[0] != contents[1]


def test_the_sides_are_drawn_independently(tmp_path: Path) -> None:
    from conftest import values_of

    lines = [f"the {word} sees the {word} house now" for word in ("brown", "yellow", "little", "wonderful")] * 5
    for suffix in ("en", "xx"):
        (tmp_path / f"train.{suffix}").write_text("".join(f"{line}\n" for line in lines))
    files = [f"data.{name}={tmp_path}/train" for name in ("train", "validation")]
    words = ["data=files", "data.target_lang=xx", *files, f"data.cache_dir={tmp_path}/cache", "tokenizer.vocab_size=60"]
    config = validated(TrainConfig, values_of("train", words))
    (batch,) = batches(prepare(config.data, config.tokenizer), sampling=(0.3, 0.3)).load(np.arange(20), 0)
    width = min(batch.source.shape[1], batch.target_out.shape[1])
    equal = (batch.source[:, :width] == batch.target_out[:, :width]).all(1)
    assert equal.sum() < 5


@pytest.mark.parametrize("sampling", [0.0, 0.5])
def test_alignments_count_words_that_spaces_separate(sampling: float, tmp_path: Path) -> None:
    from conftest import values_of

    lines = [f"a\xa0{word} sees\u2003the {word} now" for word in ("cat", "dog", "bird", "house")] * 5
    for suffix in ("en", "xx"):
        (tmp_path / f"train.{suffix}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (tmp_path / "train.gold").write_text("0-0 1-1 2-2 3-3\n" * len(lines))
    files = [f"data.{name}={tmp_path}/train" for name in ("train", "validation")]
    words = ["data=files", "data.target_lang=xx", "data.alignments=gold", *files, f"data.cache_dir={tmp_path}/cache"]
    config = validated(TrainConfig, values_of("train", [*words, "tokenizer.vocab_size=40"]))
    prepared = prepare(config.data, config.tokenizer)
    found = batches(prepared, sampling=(sampling, sampling), guided=True)
    (batch,) = found.load(np.arange(4), 0)
    assert batch.alignment is not None
    real = batch.target_out != prepared.tokenizers.target.pad
    assert torch.equal(batch.alignment.sum(-1) > 0, real)  # each word, to its last, is linked


@pytest.mark.parametrize("sampling", [(0.0, 0.0), (0.3, 0.0)])
def test_a_large_corpus_is_planned_in_blocks(
    sampling: tuple[float, float], prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    N = len(prepared.splits["train"])
    monkeypatch.setattr(planning, "BLOCK", N // 3)  # four blocks
    monkeypatch.setattr(planning, "RUN", 7)
    first, second = (batches(prepared, sampling=sampling).epoch(epoch) for epoch in (0, 1))
    assert len(first) == len(second)
    for epoch in (first, second):
        assert sorted(i for batch in epoch for i in batch.tolist()) == list(range(N))
    assert [batch.tolist() for batch in first] != [batch.tolist() for batch in second]
    middle = len(first) // 2
    resumed = batches(prepared, sampling=sampling).epoch(0)
    assert resumed[middle].tolist() == first[middle].tolist()
    assert resumed[-1].tolist() == first[-1].tolist()
    with pytest.raises(IndexError):
        resumed[len(resumed)]
    quarter = np.concatenate([first[i] for i in range(len(first) // 4)])
    assert quarter.min() < N / 8
    assert quarter.max() > 7 * N / 8
    if sampling == (0.0, 0.0):
        source, target = prepared.splits["train"].source, prepared.splits["train"].target
        for batch in first:
            assert len(batch) * max(source.lengths_of(batch).max(), target.lengths_of(batch).max()) <= 512


def test_one_block_is_planned_as_a_whole(prepared: Prepared) -> None:
    train = prepared.splits["train"]
    expected = plan(
        np.diff(train.source.offsets),
        np.diff(train.target.offsets),
        batch_tokens=512,
        batch_sentences=None,
        rng=np.random.default_rng([1, 3]),
    )
    assert order(batches(prepared), 3) == [batch.tolist() for batch in expected]


def test_only_the_block_in_use_is_planned(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    real = planning.plan

    def counted(*args: Any, **options: Any) -> list[Any]:  # noqa: ANN401
        planned.append(len(args[0]))
        return real(*args, **options)

    monkeypatch.setattr(planning, "plan", counted)
    monkeypatch.setattr(planning, "BLOCK", 100)
    monkeypatch.setattr(planning, "RUN", 7)
    epoch = batches(prepared).epoch(0)
    assert planned == []
    for position in range(3):
        epoch[position]
    assert len(planned) == 1
    assert planned[0] <= 107
