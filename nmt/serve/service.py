"""What the service does for a request, apart from HTTP: checks, the queue, answers."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from nmt.config.errors import UserError
from nmt.explain.explanation import Explanation, beam_tree, explain
from nmt.serve.batcher import Batcher, QueueSettings
from nmt.serve.guard import RefusedError
from nmt.serve.messages import (
    ExplainAnswer,
    ExplainRequest,
    ModelsAnswer,
    ScoredText,
    TranslateAnswer,
    TranslateRequest,
    Tree,
    TreeNode,
    Window,
)
from nmt.serve.metrics import Metrics
from nmt.serve.models import ServedModel
from nmt.translate.beam_variants import Node
from nmt.translate.translator import Translation, Translator

IMPOSSIBLE = -1e9  # the log-probability 0 as a number that JSON has


class Service:
    """Models, their queue and the figures about them."""

    def __init__(self, models: Mapping[str, ServedModel], queue: QueueSettings, max_texts: int) -> None:
        """max_texts: the limit of one request."""
        self.models, self.max_texts = models, max_texts
        self.metrics = Metrics(lambda: len(self.batcher))
        self.batcher = Batcher(queue, self.metrics.observe_batch)

    def describe(self) -> ModelsAnswer:
        """All models."""
        return ModelsAnswer(models=[model.info for model in self.models.values()], default=next(iter(self.models)))

    def model(self, name: str | None) -> ServedModel:
        """A model by name. Raises UserError if there is none."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise UserError(f"model: there is no {name[:100]!r}, but: {', '.join(self.models)}")
        return self.models[name]

    async def translate(self, request: TranslateRequest) -> TranslateAnswer:
        """Raises UserError or QueueFullError."""
        model = self.model(request.model)
        translator = model.with_search(request.values(), 1 if request.target is not None else request.nbest)
        texts = [request.text] if isinstance(request.text, str) else request.text
        self.check_number(texts, "text")
        if request.target is not None and request.nbest > 1:
            raise UserError("target: is scored without a search; leave out nbest")
        answer = partial(TranslateAnswer, model=model.name)
        if request.attend or request.prefix or request.tree:
            return answer(**await self._guided(model, translator, request, texts))
        if request.target is None:
            found = await self.search(model, translator, texts, request.nbest)
        else:
            found = await self._score(model, translator, texts, request.target)
        return answer(translations=[[scored_text(one, request.alignment) for one in nbest] for nbest in found])

    async def search(
        self, model: ServedModel, translator: Translator, texts: Sequence[str], nbest: int
    ) -> list[list[Translation]]:
        """The n best translations of each text, in batches shared with other requests."""
        tokens = [model.check_length(text, f"text {number}") for number, text in enumerate(texts, 1)]
        work = partial(translator.translate_nbest, n=nbest)
        key = "search", model.name, translator.search.model_dump_json(), nbest
        return await self._queued(model, work, texts, tokens, key, translator)

    async def _score(
        self, model: ServedModel, translator: Translator, texts: Sequence[str], target: str | list[str]
    ) -> list[list[Translation]]:
        targets = [target] if isinstance(target, str) else target
        if len(targets) != len(texts):
            raise UserError(f"target: {len(targets)} translations of {len(texts)} texts")
        tokens = [
            max(model.check_target(given, f"target {number}"), model.check_length(text, f"text {number}"))
            for number, (text, given) in enumerate(zip(texts, targets, strict=True), 1)
        ]

        def work(pairs: Sequence[tuple[str, str]]) -> list[list[Translation]]:
            sources, given = ([pair[side] for pair in pairs] for side in (0, 1))
            return [[scored] for scored in translator.score(sources, given)]

        pairs = list(zip(texts, targets, strict=True))
        key = "score", model.name, translator.search.model_dump_json()  # scores depend on the length penalty
        return await self._queued(model, work, pairs, tokens, key, translator)

    async def _guided(
        self, model: ServedModel, translator: Translator, request: TranslateRequest, texts: Sequence[str]
    ) -> dict[str, Any]:
        """A request about one text that shares no batch."""
        if not isinstance(request.text, str) or (request.target is not None and not isinstance(request.target, str)):
            raise UserError("attend, prefix, tree: are for one text, not for a list")
        tokens = model.check_length(request.text, "text")
        if isinstance(request.target, str):
            tokens = max(tokens, model.check_target(request.target, "target"))
        model.check_guidance(request.attend, request.prefix)
        steered: dict[str, Any] = {"attend": request.attend}
        started = {**steered, "prefix": request.prefix or ""}

        def work(items: Sequence[str]) -> list[tuple[list[Translation], Tree | None]]:
            (text,) = items
            if isinstance(request.target, str):
                return [(translator.score([text], [request.target], **steered), None)]
            if not request.tree:
                return [(translator.translate_nbest([text], request.nbest, **started)[0], None)]
            found, steps = beam_tree(translator, text, request.nbest, **started)
            return [(found, _tree(translator, steps))]

        if request.target is not None and (request.prefix or request.tree):
            raise UserError("target: is scored without a search; leave out prefix and tree")
        ((found, tree),) = await self._queued(model, work, texts, [tokens], None, translator)
        return {"translations": [[scored_text(one, request.alignment) for one in found]], "tree": tree}

    async def explain(self, request: ExplainRequest) -> ExplainAnswer:
        """Raises UserError or QueueFullError."""
        model = self.model(request.model)
        tokens = model.check_length(request.text, "text")
        model.check_guidance(request.attend)

        def work(items: Sequence[str]) -> list[Explanation]:
            options = {"attend": request.attend, "saliency": request.saliency}
            return [explain(model.translator, text, request.target, **options) for text in items]  # type: ignore[arg-type]

        (found,) = await self._queued(model, work, [request.text], [tokens], None, model.translator)
        window = None
        if found.centres is not None and found.reach is not None:
            window = Window(centres=_rounded(found.centres), reach=found.reach)
        return ExplainAnswer(
            model=model.name,
            source_tokens=found.source_tokens,
            tokens=found.tokens,
            token_log_probs=_rounded(found.token_log_probs),
            log_prob=max(found.log_prob, IMPOSSIBLE),
            alignment=_rounded(found.alignment),
            heads=_rounded(found.heads),
            window=window,
            stops=found.stops,
            saliency=_rounded(found.saliency),
        )

    async def _queued(
        self,
        model: ServedModel,
        work: Any,  # noqa: ANN401
        items: Sequence[Any],
        tokens: Sequence[int],
        key: Any,  # noqa: ANN401
        translator: Translator,
    ) -> list[Any]:
        """The results of the items, whose places in the queue are given up if the request is cancelled."""
        most = translator.search.batch_tokens // translator.searcher.beam_size // self.batcher.settings.workers
        futures = self.batcher.submit(work, items, tokens, key, most)
        try:
            results = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                future.cancel()
        self.metrics.sentences.labels(model.name).inc(len(items))
        self.metrics.tokens.labels(model.name).inc(sum(tokens))
        return results

    def check_number(self, texts: Sequence[str], field: str) -> None:
        """Raises UserError without texts, RefusedError if there are too many in this field of a request."""
        if not texts:
            raise UserError(f"{field}: is an empty list")
        most = min(self.max_texts, self.batcher.settings.sentences)
        if len(texts) > most:
            raise RefusedError(413, f"{field}: has {len(texts)} texts, but at most {most} are taken")


def scored_text(found: Translation, with_alignment: bool) -> ScoredText:
    """A translation in the form of the answer."""
    return ScoredText(
        text=found.text,
        score=max(found.score, IMPOSSIBLE),
        log_prob=max(found.log_prob, IMPOSSIBLE),
        source_tokens=found.source_tokens,
        tokens=found.tokens,
        token_log_probs=_rounded(found.token_log_probs),
        alignment=_rounded(found.alignment) if with_alignment else None,
    )


def _tree(translator: Translator, steps: Sequence[Sequence[Node]]) -> Tree:
    pieces = translator.tokenizers.target.pieces

    def answered(nodes: Sequence[Node]) -> list[TreeNode]:
        tokens = pieces([node.token for node in nodes])
        return [TreeNode(**{**node._asdict(), "token": token}) for node, token in zip(nodes, tokens, strict=True)]

    return Tree(steps=[answered(nodes) for nodes in steps])


def _rounded(values: Any) -> Any:  # noqa: ANN401
    """Numbers of any depth with five decimals: an answer is mostly numbers."""
    return None if values is None else np.maximum(np.asarray(values, dtype=np.float64).round(5), IMPOSSIBLE).tolist()
