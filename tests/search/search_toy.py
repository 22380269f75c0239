"""A model small enough to enumerate, whose output depends on the sentence and on the whole prefix."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nmt.model.state import StepOutput
from nmt.translate.search.hypothesis import LengthPenalty, Limits, Symbols

PAD, BOS, EOS = 0, 1, 2
SYMBOLS = Symbols(BOS, EOS, (PAD, BOS))
CPU = torch.device("cpu")
NO_PENALTY = LengthPenalty("none", 0.0)
PENALTIES = [
    NO_PENALTY,
    LengthPenalty("average", 1.0),
    LengthPenalty("average", 0.6),
    LengthPenalty("gnmt", 0.9),
]


@dataclass
class Prefixes:
    """The sentence (N,) and the tokens so far (N, t) of every hypothesis."""

    sentences: Tensor
    tokens: Tensor

    def select(self, index: Tensor) -> "Prefixes":
        return Prefixes(self.sentences[index], self.tokens[index])

    def branch(self, index: Tensor, sentences: Tensor | None) -> "Prefixes":
        return self.select(index)


@dataclass
class Toy:
    """Logits are a random function of the sentence and the prefix; attention spells out both."""

    seed: int
    vocabulary: int = 6
    bias: dict[int, float] = field(default_factory=dict)  # added to the logits of a token
    coarse: bool = False  # whole-numbered logits, so that many scores are equal
    dtype: torch.dtype = torch.float32
    attends: bool = True
    source: int = 16
    rows: list[int] = field(default_factory=list)  # the batch size of every step taken

    def __post_init__(self) -> None:
        table = 2 * torch.randn(10007, self.vocabulary, generator=torch.Generator().manual_seed(self.seed))
        for token, bias in self.bias.items():
            table[:, token] += bias
        self.table = (table.round() if self.coarse else table).to(self.dtype)

    def start(self, sentences: list[int]) -> Prefixes:
        return Prefixes(torch.tensor(sentences, dtype=torch.int64), torch.empty(len(sentences), 0, dtype=torch.int64))

    def step(self, tokens: Tensor, state: Prefixes) -> StepOutput[Prefixes]:
        assert tokens.dtype == torch.int64
        assert ((tokens >= 0) & (tokens < self.vocabulary)).all()  # as an embedding would demand
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
        """What attention (T, S) the hypothesis must have been given."""
        prefix = [BOS, *tokens]
        rows = [[sentence, *prefix[:length]] for length in range(1, len(prefix))]
        return torch.tensor([row + [-1] * (self.source - len(row)) for row in rows], dtype=torch.float32)

    def next_log_probs(self, sentence: int, tokens: list[int]) -> list[float]:
        """The model's own distribution after a prefix."""
        state = self.start([sentence])
        for token in [BOS, *tokens]:
            logits, _, state = self.step(torch.tensor([token]), state)
        return logits[0].double().log_softmax(-1).tolist()

    def log_prob(self, sentence: int, tokens: list[int]) -> float:
        return sum(self.next_log_probs(sentence, tokens[:t])[token] for t, token in enumerate(tokens))


def allowed(length: int, limits: Limits, sentence: int, vocabulary: int) -> list[int]:
    """The tokens that may stand at place `length` (from 1)."""
    if length == limits.max_lengths[sentence]:
        return [EOS]
    tokens = [token for token in range(vocabulary) if token not in SYMBOLS.banned]
    return [token for token in tokens if token != EOS or length > limits.min_length]


def enumerate_all(toy: Toy, limits: Limits, sentence: int) -> Iterator[tuple[list[int], float]]:
    """Every hypothesis within the limits, with its log-probability."""
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
