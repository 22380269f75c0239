"""A toy model whose hypotheses can be enumerated; its output depends on the sentence and on the whole prefix."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmt.config.schema import training as schema
from nmt.model.seq2seq import StepOutput
from nmt.ops.draws import sentence_keys
from nmt.translate.forbidden import Forbidden
from nmt.translate.sampling import make_search
from nmt.translate.search import NO_GUIDANCE, Guidance, Hypothesis, Limits, SearchBatch, Symbols
from nmt.translate.selection import Scorer

PAD, BOS, EOS = 0, 1, 2
SYMBOLS = Symbols(BOS, EOS, (PAD, BOS))
CPU = torch.device("cpu")
NO_PENALTY = Scorer("none", 0.0)
PENALTIES = [NO_PENALTY, Scorer("average", 1.0), Scorer("average", 0.6), Scorer("gnmt", 0.9)]
COMMON: dict[str, Any] = {"min_length": 1, "max_length": 9, "max_ratio": 2, "max_source_length": 9}
COMMON |= {"batch_tokens": 9, "replace_unknown": False}
BEAM = {"beam_size": 3, "length_penalty": "none", "alpha": 0.0, "stop": "beam", "coverage_penalty": 0.0}
SECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": BEAM,
    "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
}


@dataclass
class Prefixes:
    """The toy's decoder state: sentence index (N,) and tokens so far (N, t) of every hypothesis."""

    sentences: Tensor
    tokens: Tensor

    def select(self, index: Tensor) -> "Prefixes":
        return Prefixes(self.sentences[index], self.tokens[index])

    def branch(self, index: Tensor, sentences: Tensor | None) -> "Prefixes":
        return self.select(index)


@dataclass
class Toy:
    """Its logits are a random function of sentence and prefix; its attention weights spell out sentence and prefix."""

    seed: int
    vocabulary: int = 6
    bias: dict[int, float] = field(default_factory=dict)  # token -> number added to its logits
    coarse: bool = False  # rounds logits to whole numbers, so that many scores are equal
    dtype: torch.dtype = torch.float32
    attends: bool = True
    source: int = 16
    rows: list[int] = field(default_factory=list)  # batch size of each step so far

    def __post_init__(self) -> None:
        table = 2 * torch.randn(10007, self.vocabulary, generator=torch.Generator().manual_seed(self.seed))
        for token, bias in self.bias.items():
            table[:, token] += bias
        self.table = (table.round() if self.coarse else table).to(self.dtype)

    def start(self, sentences: list[int]) -> Prefixes:
        return Prefixes(torch.tensor(sentences, dtype=torch.int64), torch.empty(len(sentences), 0, dtype=torch.int64))

    def step(self, tokens: Tensor, state: Prefixes) -> StepOutput[Prefixes]:
        assert tokens.dtype == torch.int64
        assert ((tokens >= 0) & (tokens < self.vocabulary)).all()  # as an embedding requires
        assert len(tokens) == len(state.sentences) > 0
        self.rows.append(len(tokens))
        prefix = torch.cat([state.tokens, tokens[:, None]], 1)
        code = state.sentences
        for column in prefix.unbind(1):
            code = (31 * code + column + 1) % 1000003
        weights = torch.full((len(tokens), self.source), -1.0)
        weights[:, 0] = state.sentences
        weights[:, 1 : prefix.shape[1] + 1] = prefix
        logits = self.table[code % len(self.table)]
        return StepOutput(logits, weights if self.attends else None, Prefixes(state.sentences, prefix))

    def attention(self, sentence: int, tokens: list[int]) -> Tensor:
        """Return the attention (T, S) that a search must report for the hypothesis."""
        prefix = [BOS, *tokens]
        rows = [[sentence, *prefix[:length]] for length in range(1, len(prefix))]
        return torch.tensor([row + [-1] * (self.source - len(row)) for row in rows], dtype=torch.float32)

    def next_log_probs(self, sentence: int, tokens: list[int]) -> list[float]:
        """Return the log-probabilities of all tokens after a prefix."""
        state = self.start([sentence])
        for token in [BOS, *tokens]:
            logits, _, state = self.step(torch.tensor([token]), state)
        return logits[0].double().log_softmax(-1).tolist()

    def log_prob(self, sentence: int, tokens: list[int]) -> float:
        return sum(self.next_log_probs(sentence, tokens[:t])[token] for t, token in enumerate(tokens))


def allowed(length: int, limits: Limits, sentence: int, vocabulary: int) -> list[int]:
    """List the tokens allowed at position `length`, counted from 1."""
    if length == limits.max_lengths[sentence]:
        return [EOS]
    tokens = [token for token in range(vocabulary) if token not in SYMBOLS.banned]
    return [token for token in tokens if token != EOS or length > limits.min_length]


def enumerate_all(toy: Toy, limits: Limits, sentence: int) -> Iterator[tuple[list[int], float]]:
    """Yield every hypothesis within the limits with its log-probability."""
    stack: list[tuple[list[int], float]] = [([], 0.0)]
    while stack:
        prefix, log_prob = stack.pop()
        following = toy.next_log_probs(sentence, prefix)
        for token in allowed(len(prefix) + 1, limits, sentence, toy.vocabulary):
            extended = ([*prefix, token], log_prob + following[token])
            if extended[1] > -math.inf:
                if token == EOS:
                    yield extended
                else:
                    stack.append(extended)


def batch_of(
    model: Any,  # noqa: ANN401
    limits: Limits,
    sentences: Sequence[int] | None = None,
    *,
    forbidden: Forbidden | None = None,
    guidance: Guidance = NO_GUIDANCE,
    seed: int = 0,
    **fields: Any,  # noqa: ANN401
) -> SearchBatch[Prefixes]:
    """Make a batch of sentences for a model with `step` and `start`; by default one sentence per length limit."""
    sentences = list(range(len(limits.max_lengths))) if sentences is None else sentences
    symbols = SYMBOLS
    if forbidden is not None:
        symbols = SYMBOLS._replace(banned=(PAD, BOS, *forbidden.always))
    guidance = guidance._replace(forbidden=forbidden)
    fields = {"keys": partial(sentence_keys, [seed], np.array(sentences)), "guidance": guidance, **fields}
    return SearchBatch(model.step, model.start(sentences), symbols, limits, CPU, **fields)


def search(kind: str, batch: SearchBatch[Prefixes], n: int = 1, **changes: Any) -> list[list[Hypothesis]]:  # noqa: ANN401
    """Return the n best hypotheses of the search method that the configuration's section `search` would choose."""
    values: dict[str, Any] = {"kind": kind} | COMMON | SECTIONS[kind] | changes
    section: schema.Search = {"greedy": schema.Greedy, "beam": schema.Beam, "sampling": schema.Sampling}[kind](**values)
    return make_search(section)(batch, n)


def bits(nbests: list[list[Hypothesis]]) -> list[list[tuple[list[int], float, float, list[float]]]]:
    """Return all that a search returns except the attention, for exact comparison."""
    return [[(h.tokens, h.score, h.log_prob, h.token_log_probs) for h in nbest] for nbest in nbests]


def plain_beam(
    toy: Toy, limits: Limits, sentence: int, beam_size: int, scorer: Scorer, stop: str
) -> list[tuple[list[int], float]]:
    """Run beam search with plain lists: sort all candidates, and stop early only with stop="beam", when K have finished
    and none that is live scores higher so far. Returns all finished hypotheses, best first."""

    def score(tokens: list[int], log_prob: float) -> float:
        return log_prob / scorer.penalty(len(tokens))

    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    while live:
        candidates = []
        for prefix, log_prob in live:
            following = toy.next_log_probs(sentence, prefix)
            for token in allowed(len(prefix) + 1, limits, sentence, toy.vocabulary):
                candidates.append(([*prefix, token], log_prob + following[token]))
        candidates.sort(key=lambda candidate: -candidate[1])
        ended = [c for c in candidates[:beam_size] if c[0][-1] == EOS]
        finished += [(tokens, score(tokens, log_prob)) for tokens, log_prob in ended]
        live = [c for c in candidates if c[0][-1] != EOS][:beam_size]
        best = max((value for _, value in finished), default=-math.inf)
        if stop == "beam" and live and len(finished) >= beam_size and score(*live[0]) <= best:
            break
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])
