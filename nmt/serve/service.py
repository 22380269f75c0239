"""Checks and answers requests. Their sentences wait in one queue, from which they are taken in batches."""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from starlette.exceptions import HTTPException

from nmt.config.errors import UserError
from nmt.explain.explanation import Explanation, explain
from nmt.serve import messages
from nmt.serve.models import ServedModel
from nmt.translate.translation import Translation
from nmt.translate.translator import Translator

RETRY = 1  # seconds after which a refused client may try again
PATIENCE = 10  # while sentences keep arriving, a free thread waits for at most this many times `QueueSettings.wait`
IMPOSSIBLE = -1e9  # stands for -infinity, which JSON cannot express

Work = Callable[[Sequence[Any]], Sequence[Any]]
"""Computes the results of the items of a batch, in the same order."""


@dataclass(eq=False)
class _Job:
    work: Work
    key: Hashable  # jobs with equal keys may share a batch; a job with the key None shares none
    item: Any  # what `work` gets for this job
    tokens: int  # number of tokens of the item
    most_tokens: int  # largest size of a batch that begins with this job: number of jobs x tokens of the longest
    arrived: float = field(default_factory=time.monotonic)
    future: "Future[Any]" = field(default_factory=Future)


@dataclass(frozen=True)
class QueueSettings:
    """The settings of a Batcher."""

    workers: int  # number of threads that compute batches at the same time
    threads: int  # number of torch's threads in each worker
    sentences: int  # number of sentences that may wait in the queue
    wait: float  # seconds that a free worker waits, after each arrival, for more sentences for the same batch


def worker_count(requested: int | None, device: str, threads: int) -> int:
    """Return how many threads compute batches at the same time: on a CPU, by default as many as torch has threads.

    Raises UserError if several are requested on a GPU, whose batches run one after the other anyway.
    """
    if device == "cuda" and (requested or 1) > 1:
        raise UserError(f"workers={requested}: on a GPU, one worker computes all batches; leave workers out")
    return requested or (threads if device == "cpu" else 1)


class Batcher:
    """A queue of jobs, one for each sentence, and the threads that work on it.

    A free thread takes the job that has waited longest, and batches it with jobs of the same key that are nearest in
    length, but no more than its share of all jobs. A cancelled job leaves the queue.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.settings, self._open = settings, True
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._running = 0  # number of jobs that have left the queue and are being computed
        names = (f"nmt-serve-{number}" for number in range(settings.workers))
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Return the number of jobs that wait in the queue."""
        return len(self._jobs)

    def submit(
        self, work: Work, items: Sequence[Any], tokens: Sequence[int], key: Hashable, most_tokens: int
    ) -> "list[Future[Any]]":
        """Queue a job for each item and return the futures of the results. Raises HTTPException, and queues nothing, if
        there is no room for all. most_tokens: the largest size of a batch, in tokens with padding."""
        with self._changed:
            if len(self._jobs) + len(items) > self.settings.sentences or not self._open:
                message = f"too many sentences are waiting; try again in {RETRY} s"
                raise HTTPException(503, message, {"retry-after": str(RETRY)})
            jobs = [_Job(work, key, item, length, most_tokens) for item, length in zip(items, tokens, strict=True)]
            self._jobs += jobs
            self._changed.notify()
        for job in jobs:
            job.future.add_done_callback(self._forget_cancelled)
        return [job.future for job in jobs]

    def close(self) -> None:
        """Refuse further jobs, finish those that wait, and end the threads."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _forget_cancelled(self, future: "Future[Any]") -> None:
        if future.cancelled():
            with self._changed:
                self._jobs = [job for job in self._jobs if job.future is not future]

    def _run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        while batch := self._next_batch():
            running = [job for job in batch if job.future.set_running_or_notify_cancel()]
            outcomes = _outcomes(running) if running else []
            with self._changed:
                self._running -= len(batch)
            for job, outcome in zip(running, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    job.future.set_exception(outcome)
                else:
                    job.future.set_result(outcome)

    def _next_batch(self) -> list[_Job]:
        """Wait for jobs and take a batch of them out of the queue; [] once the queue is closed and empty."""
        entered = time.monotonic()
        with self._changed:
            while True:
                while not self._jobs:
                    if not self._open:
                        return []
                    self._changed.wait()
                # Wait from `entered` on, even if the jobs arrived earlier: clients that this thread has just answered
                # may soon send more sentences.
                first, last = (max(entered, job.arrived) for job in (self._jobs[0], self._jobs[-1]))
                until = min(last + self.settings.wait, first + PATIENCE * self.settings.wait)
                remaining = until - time.monotonic()
                if remaining <= 0 or not self._open:
                    break
                self._changed.wait(remaining)
            chosen = _similar(self._jobs, -(-(len(self._jobs) + self._running) // self.settings.workers))
            self._running += len(chosen)
            taken = set(chosen)
            self._jobs = [job for job in self._jobs if job not in taken]
            if self._jobs:
                self._changed.notify()
        return chosen


class Service:
    """The models, and the queue of their sentences."""

    def __init__(self, models: Mapping[str, ServedModel], queue: QueueSettings, max_texts: int) -> None:
        """max_texts: the largest number of texts in one request."""
        self.models, self.max_texts = models, max_texts
        self.batcher = Batcher(queue)

    def describe(self) -> messages.ModelsAnswer:
        """Describe all models."""
        return messages.ModelsAnswer(
            models=[model.info for model in self.models.values()], default=next(iter(self.models))
        )

    def model(self, name: str | None) -> ServedModel:
        """Find a model by name; None finds the first model. Raises UserError if no model has this name."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise UserError(f"model: there is no {name[:100]!r}; the models are {', '.join(self.models)}")
        return self.models[name]

    async def translate(self, request: messages.TranslateRequest) -> messages.TranslateAnswer:
        """Translate or score texts, in batches shared with other requests. Raises UserError if the request is invalid,
        HTTPException if it is too large or the queue is full."""
        model, scores = self.model(request.model), request.target is not None
        translator = model.with_search(request.search(), 1 if scores else request.nbest)
        texts = [request.text] if isinstance(request.text, str) else request.text
        targets = [request.target] if isinstance(request.target, str) else request.target or []
        guided = bool(request.attend or request.prefix or request.tree)
        most = min(self.max_texts, self.batcher.settings.sentences)
        if not texts:
            raise UserError("text: is an empty list")
        if len(texts) > most:
            raise HTTPException(413, f"text: has {len(texts)} texts, but the limit is {most}")
        if guided and not isinstance(request.text, str):
            raise UserError("attend, prefix, tree: are for one text, not for a list")
        if scores and (request.nbest > 1 or request.prefix or request.tree):
            raise UserError("target: is scored without a search; leave out nbest, prefix and tree")
        if scores and len(targets) != len(texts):
            wanted = f"one translation of each text is expected, {len(texts)} in all"
            raise UserError(f"target: {wanted}, not {len(targets)}")
        tokens = [model.count_tokens(text, f"text {number}") for number, text in enumerate(texts, 1)]
        of_targets = [model.count_tokens(line, f"target {number}", "target") for number, line in enumerate(targets, 1)]
        model.check_guidance(request.attend, request.prefix)
        settings = translator.settings.model_dump_json()  # scores depend on it too, by the length penalty
        answers = await self._queued(
            _work_of(request, translator),
            list(zip(texts, targets, strict=True)) if scores else texts,
            list(map(max, tokens, of_targets)) if scores else tokens,
            None if guided else (scores, model.info.name, settings, request.nbest),
            translator,
        )
        lists = [_scored_texts(nbest, request.alignment) for nbest, _ in answers]
        return messages.TranslateAnswer(model=model.info.name, translations=lists, tree=answers[0][1])

    async def explain(self, request: messages.ExplainRequest) -> messages.ExplainAnswer:
        """Explain a translation. Raises the errors of `translate`."""
        model = self.model(request.model)
        tokens = model.count_tokens(request.text, "text")
        model.check_guidance(request.attend)

        def work(items: Sequence[str]) -> list[Explanation]:
            options = {"attend": request.attend, "gradients": request.saliency}
            return [explain(model.translator, text, request.target, **options) for text in items]  # type: ignore[arg-type]

        (explanation,) = await self._queued(work, [request.text], [tokens], None, model.translator)
        window = None
        if explanation.centres is not None and explanation.reach is not None:
            window = messages.Window(centres=_rounded(explanation.centres), reach=explanation.reach)
        return messages.ExplainAnswer(
            model=model.info.name,
            source_tokens=explanation.source_tokens,
            tokens=explanation.tokens,
            token_log_probs=_rounded(explanation.token_log_probs),
            log_prob=max(sum(explanation.token_log_probs), IMPOSSIBLE),
            alignment=_rounded(explanation.alignment),
            heads=_rounded(explanation.heads),
            window=window,
            stops=explanation.stops,
            saliency=_rounded(explanation.saliency),
        )

    async def _queued(
        self, work: Work, items: Sequence[Any], tokens: Sequence[int], key: Hashable, translator: Translator
    ) -> list[Any]:
        """Queue items, as `Batcher.submit` does, and wait for their results. If the request is cancelled, the items
        leave the queue. `translator` limits the size of the batch."""
        most = translator.settings.batch_tokens // translator.method.beam_size // self.batcher.settings.workers
        futures = self.batcher.submit(work, items, tokens, key, most)
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()


def _work_of(request: messages.TranslateRequest, translator: Translator) -> Work:
    """Make the function that searches the texts of a request, or scores its pairs of a text and a translation. Its
    results are n-best lists, each with the tree of its search or None."""
    controls: dict[str, Any] = {key: value for key in ("attend", "prefix") if (value := getattr(request, key))}

    def search(texts: Sequence[str]) -> list[tuple[list[Translation], messages.Tree | None]]:
        return [(nbest, None) for nbest in translator.translate_nbest(texts, n=request.nbest, **controls)]

    def search_with_tree(texts: Sequence[str]) -> list[tuple[list[Translation], messages.Tree | None]]:
        (text,) = texts
        nbest, steps = translator.beam_tree(text, request.nbest, **controls)
        pieces = translator.tokenizers.target.pieces
        described = [[{**node._asdict(), "token": pieces([node.token])[0]} for node in nodes] for nodes in steps]
        return [(nbest, messages.Tree.model_validate({"steps": described}))]

    def score(pairs: Sequence[tuple[str, str]]) -> list[tuple[list[Translation], messages.Tree | None]]:
        sources, translations = zip(*pairs, strict=True)
        return [([scored], None) for scored in translator.score(sources, translations, **controls)]

    return score if request.target is not None else search_with_tree if request.tree else search


def _outcomes(jobs: list[_Job]) -> list[Any]:
    """Run jobs as one batch and return for each its result or its error."""
    try:
        return list(jobs[0].work([job.item for job in jobs]))
    except Exception as error:
        if len(jobs) == 1 or not isinstance(error, UserError | MemoryError | RuntimeError):
            return [error for _ in jobs]
        # A single job may have caused the error, so each job is run alone.
        return [outcome for job in jobs for outcome in _outcomes([job])]


def _similar(jobs: Sequence[_Job], most: int) -> list[_Job]:
    """Choose a batch of at most `most` jobs: the first job, and the jobs of the same key that are nearest to it in
    length, until the batch would have more than the first job's `most_tokens`."""
    first = jobs[0]
    if first.key is None:
        return [first]
    others = [job for job in jobs[1:] if job.key == first.key]
    # The sort is stable: of jobs with the same difference in length, the one that has waited longer comes first.
    others.sort(key=lambda job: abs(job.tokens - first.tokens))
    chosen, longest = [first], first.tokens
    for job in others:
        longest = max(longest, job.tokens)
        if len(chosen) == most or longest * (len(chosen) + 1) > first.most_tokens:
            break
        chosen.append(job)
    return chosen


def _scored_texts(nbest: Sequence[Translation], with_alignment: bool) -> list[messages.ScoredText]:
    return [
        messages.ScoredText(
            text=translation.text,
            score=max(translation.score, IMPOSSIBLE),
            log_prob=max(translation.log_prob, IMPOSSIBLE),
            source_tokens=translation.source_tokens,
            tokens=translation.tokens,
            token_log_probs=_rounded(translation.token_log_probs),
            alignment=_rounded(translation.alignment) if with_alignment else None,
        )
        for translation in nbest
    ]


def _rounded(values: Any) -> Any:  # noqa: ANN401
    """Round nested numbers to five decimals, because they are most of an answer's bytes, and replace -infinity."""
    return None if values is None else np.maximum(np.asarray(values, dtype=np.float64).round(5), IMPOSSIBLE).tolist()
