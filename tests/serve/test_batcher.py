"""The queue: which sentences share a batch, in which order batches run, and what happens at errors and the end."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace

import pytest
from starlette.exceptions import HTTPException

from nmt.config.errors import UserError
from nmt.serve.service import Batcher, QueueSettings, worker_count

ONE = QueueSettings(workers=1, threads=1, sentences=100, wait=0.0)


@pytest.mark.parametrize(
    ("requested", "device", "expected"), [(None, "cpu", 4), (2, "cpu", 2), (None, "cuda", 1), (1, "cuda", 1)]
)
def test_a_gpu_has_one_worker(requested: int | None, device: str, expected: int) -> None:
    assert worker_count(requested, device, threads=4) == expected
    with pytest.raises(UserError, match="workers=3: on a GPU, one worker"):
        worker_count(3, "cuda", threads=4)


class Gate:
    """A function for the batcher that records its batches, and waits until the test opens the gate."""

    def __init__(self) -> None:
        self.open, self.started = threading.Event(), threading.Event()
        self.batches: list[list[object]] = []

    def __call__(self, items: Sequence[object]) -> list[str]:
        self.batches.append(list(items))
        self.started.set()
        assert self.open.wait(20)
        return [f"done {item}" for item in items]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


@contextmanager
def started(**changes: float) -> Iterator[Batcher]:
    batcher = Batcher(replace(ONE, **changes))  # type: ignore[arg-type]
    try:
        yield batcher
    finally:
        batcher.close()


@contextmanager
def busy(gate: Gate, most_tokens: int = 100, **changes: float) -> Iterator[tuple[Batcher, Future[str]]]:
    """Start a batcher whose first thread works on the job "busy" until the gate opens."""
    with started(**changes) as batcher:
        (first,) = batcher.submit(gate, ["busy"], [1], "key", most_tokens)
        assert gate.started.wait(20)
        yield batcher, first


def test_similar_lengths_share_a_batch_and_the_oldest_goes_first(gate: Gate) -> None:
    with busy(gate, most_tokens=40) as (batcher, first):
        lengths = [9, 1, 10, 2, 8, 30, 11]
        futures = batcher.submit(gate, lengths, lengths, "key", 40)
        gate.open.set()
        assert [future.result(20) for future in (first, *futures)] == ["done busy", *(f"done {n}" for n in lengths)]
        # The sentence of length 9 has waited longest; 10 and 8 are nearest in length. A fourth, of length 11, would
        # exceed the batch's 40 tokens.
        assert gate.batches == [["busy"], [9, 10, 8], [1, 2, 11], [30]]


def test_no_job_starves_however_many_fit_better_elsewhere(gate: Gate) -> None:
    with busy(gate, most_tokens=10) as (batcher, _):
        (long,) = batcher.submit(gate, ["long"], [500], "key", 10)  # exceeds the limit of a batch
        short = batcher.submit(gate, range(50), [1] * 50, "key", 10)
        gate.open.set()
        assert long.result(20) == "done long"
        assert gate.batches[1] == ["long"]
        assert [future.result(20) for future in short] == [f"done {n}" for n in range(50)]
        assert max(map(len, gate.batches)) == 10


def test_other_keys_and_jobs_without_one_have_batches_of_their_own(gate: Gate) -> None:
    with busy(gate) as (batcher, _):
        futures = []
        for item, key in (("a", "x"), ("b", "y"), ("c", None), ("d", None), ("e", "x")):
            futures += batcher.submit(gate, [item], [1], key, 100)
        gate.open.set()
        assert [future.result(20) for future in futures] == [f"done {item}" for item in "abcde"]
        assert gate.batches[1:] == [["a", "e"], ["b"], ["c"], ["d"]]


def test_sentences_that_arrive_together_share_a_batch_though_a_thread_is_free(gate: Gate) -> None:
    gate.open.set()
    with started(wait=0.2) as batcher:
        futures = [future for item in range(5) for future in batcher.submit(gate, [item], [3], "key", 100)]
        assert [future.result(20) for future in futures] == [f"done {item}" for item in range(5)]
        assert gate.batches == [[0, 1, 2, 3, 4]]


def test_a_free_thread_leaves_a_busy_one_its_share(gate: Gate) -> None:
    """A free thread takes only its share of the waiting sentences. Otherwise one thread would get nearly all sentences
    of clients that wait for answers, the other one only a few at a time."""
    lengths = [5, 1, 6, 2, 7]
    with busy(gate, workers=2, wait=0.2) as (batcher, _):
        futures = batcher.submit(gate, lengths, lengths, "key", 100)
        deadline = time.monotonic() + 20
        while len(gate.batches) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (gate.batches, len(batcher)) == ([["busy"], [5, 6, 7]], 2)
        gate.open.set()
        assert [future.result(20) for future in futures] == [f"done {n}" for n in lengths]


def test_a_full_queue_takes_all_of_a_request_or_nothing(gate: Gate) -> None:
    with busy(gate, sentences=3) as (batcher, _):
        batcher.submit(gate, ["a", "b"], [1, 1], "key", 100)
        with pytest.raises(HTTPException) as full:
            batcher.submit(gate, ["c", "d"], [1, 1], "key", 100)
        assert (full.value.status_code, full.value.headers) == (503, {"retry-after": "1"})
        assert len(batcher) == 2
        (last,) = batcher.submit(gate, ["e"], [1], "key", 100)
        gate.open.set()
        assert last.result(20) == "done e"


def test_cancelled_jobs_free_their_places(gate: Gate) -> None:
    with busy(gate, sentences=2) as (batcher, _):
        left, stayed = batcher.submit(gate, ["left", "stayed"], [1, 1], "key", 100)
        assert left.cancel()
        assert len(batcher) == 1
        (late,) = batcher.submit(gate, ["late"], [1], "key", 100)
        gate.open.set()
        assert [stayed.result(20), late.result(20)] == ["done stayed", "done late"]
        with pytest.raises(CancelledError):
            left.result(0)
        assert not any("left" in batch for batch in gate.batches)


def test_only_the_job_at_fault_fails() -> None:
    def work(items: Sequence[str]) -> list[str]:
        if "bad" in items:
            raise UserError("bad is refused")
        return list(items)

    with started(wait=0.1) as batcher:
        good, bad, other = batcher.submit(work, ["good", "bad", "other"], [1, 1, 1], "key", 100)
        assert (good.result(20), other.result(20)) == ("good", "other")
        with pytest.raises(UserError, match="bad is refused"):
            bad.result(20)


def test_a_bug_reaches_every_request_and_the_thread_goes_on() -> None:
    def work(items: Sequence[str]) -> list[str]:
        raise KeyError(items[0])

    with started() as batcher:
        for future in batcher.submit(work, ["a", "b"], [1, 1], "key", 100):
            with pytest.raises(KeyError):
                future.result(20)
        (fine,) = batcher.submit(lambda items: items, ["c"], [1], "key", 100)
        assert fine.result(20) == "c"


def test_closing_finishes_what_waits_and_refuses_more(gate: Gate) -> None:
    gate.open.set()
    with started(wait=60.0) as batcher:
        (waiting,) = batcher.submit(gate, ["a"], [1], "key", 100)
        began = time.monotonic()
    assert waiting.result(0) == "done a"
    assert time.monotonic() - began < 20
    with pytest.raises(HTTPException):
        batcher.submit(gate, ["b"], [1], "key", 100)
