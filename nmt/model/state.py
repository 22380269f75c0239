"""What a decoder carries between its steps, and the products of a step.

Shapes: B batch, N hypotheses (the rows of a step), S source positions, E embedding, M memory, R readout, P what its
activation gets, G gates x H, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from nmt.attention.memory import Attended, Memory, Past
from nmt.attention.steering import Steering
from nmt.model.readout import LexicalModel, Readout
from nmt.model.recurrent import LayerWeights, Recurrent, RecurrentState, input_gates
from nmt.ops.linear import linear
from nmt.ops.rows import select


class State(Protocol):
    """What a search knows of a model's state: it has one row per hypothesis."""

    def select(self, index: Tensor) -> Self:
        """Take the rows `index`, int64 (M,), which may repeat."""
        ...

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Like `select`, but every sentence has the same number of rows, in a group; these may share its memory.

        sentences: int64 (A,), those that remain; by default all.
        """
        ...


StateT = TypeVar("StateT", bound=State)


class StepOutput(NamedTuple, Generic[StateT]):
    """Logits (N, V), the attention weights (N, S) they were computed with, and the state after the step.

    Weights are None without attention. Later steps must not overwrite them.
    """

    logits: Tensor
    weights: Tensor | None
    state: StateT


Step = Callable[[Tensor, StateT], StepOutput[StateT]]
"""Previous tokens, int64 (N,), and a state of N rows -> the output for the next token."""


class StepAttention(Protocol):
    """An attention that attends step by step; see nmt.attention.attention.Attention."""

    @property
    def reads_past(self) -> bool:
        """Does a step depend on what earlier steps attended to?"""
        ...

    def remember(self, states: Tensor, valid: Tensor, *, nonempty: bool = False) -> Memory:
        """(B, S, M), bool (B, S) -> Memory."""
        ...

    def start(self, valid: Tensor) -> Past:
        """bool (B, S) -> the past before the first step."""
        ...

    def step(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        """Queries (B, K, Q) of K hypotheses of each sentence -> Attended, with K for T."""
        ...


@dataclass(frozen=True, kw_only=True)
class Products(ABC):
    """What a decoder multiplies with at its steps, prepared once for a batch or for all searches.

    Training and search differ in what stands for a word and for a context: vectors, or their products with the
    parameters of gates and readout.
    """

    layers: Sequence[LayerWeights]  # of the recurrent layers, the lowest first
    conditional: LayerWeights | None  # of the second half of a conditional step
    readout: Readout
    attention: StepAttention | None
    lexical: LexicalModel | None
    word_mask: Tensor | None = None  # (B, E), dropout of the embeddings
    readout_mask: Tensor | None = None  # (B, R), dropout of the readout

    @abstractmethod
    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        """The contribution of previous words and of the fixed vector to the lowest layer's gates, (..., G)."""

    @abstractmethod
    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        """The contribution (B, G) of what the step itself computes: of the context, if the decoder attends before the
        step, and of the previous readout (B, R), if it is fed back."""

    @abstractmethod
    def conditional_gates(self, rnn: Recurrent, context: Tensor) -> Tensor:
        """The context's gates (B, G) in the second half of a conditional step."""

    @abstractmethod
    def upper_input(self, context: Tensor) -> Tensor:
        """What the layers above the first read of the context, (B, M)."""

    @abstractmethod
    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """Outputs (..., H) of the top layer, contexts, words -> readouts (..., R), before dropout."""

    @abstractmethod
    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        """Outputs (..., H), words -> what the readout's activation gets, without a context, (..., P)."""

    @abstractmethod
    def contexts(self, values: Tensor) -> Tensor:
        """The values of a memory (B, S, ...) -> what each position adds to that as a context, (B, S, P)."""


@dataclass(frozen=True, kw_only=True)
class BatchProducts(Products):
    """The products for one batch: parameters in the precision of the computation, dropout masks for all steps.

    Words are embeddings (..., E), contexts are (..., M).
    """

    # Columns of the first layer's weight_ih, by what they multiply.
    word: Tensor  # (G, E): the previous word
    fixed: Tensor  # (G, M or 0): the fixed vector
    fed: Tensor  # (G, ...): what the step itself computes, that is context and previous readout
    readout_parts: tuple[Tensor, Tensor] | None = None  # (P, H + E), (P, M): without and for a context alone

    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        """See Products. Includes the bias unless layer normalisation adds it later."""
        first = self.layers[0]
        gates = linear(word, self.word, first.bias_ih if first.norms is None else None)
        if fixed is not None:
            of_fixed = linear(fixed, self.fixed)
            gates = gates + (of_fixed[:, None] if word.dim() == 3 else of_fixed)  # noqa: PLR2004
        return gates

    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        """See Products."""
        if context is None or feed is None:
            fed = feed if context is None else context
        else:
            fed = torch.cat([context, feed], dim=1)
        return None if fed is None else linear(fed, self.fed)

    def conditional_gates(self, rnn: Recurrent, context: Tensor) -> Tensor:
        """See Products."""
        assert self.conditional is not None
        return input_gates(rnn, self.conditional, context)

    def upper_input(self, context: Tensor) -> Tensor:
        """See Products."""
        return context

    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """See Products."""
        readout: Tensor = self.readout(output, context, word)
        return readout

    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        """See Products."""
        assert self.readout_parts is not None
        inputs = torch.cat([output, word], dim=-1) if self.readout.sizes[2] else output
        return linear(inputs, self.readout_parts[0], self.readout.proj.bias)

    def contexts(self, values: Tensor) -> Tensor:
        """See Products."""
        assert self.readout_parts is not None
        return linear(values, self.readout_parts[1])


class Pending(NamedTuple):
    """What the posterior of a latent position is computed from, once the token is known."""

    readouts: Tensor  # (N, K, R)
    weights: Tensor  # (N, K)
    positions: Tensor | None  # int64 (N, K)
    partial: Tensor  # (N, P) the readout's input without a context


class HypothesisState(NamedTuple):
    """What each hypothesis has of its own."""

    recurrent: RecurrentState
    feed: Tensor | None  # (N, R) the previous readout, with input feeding
    fixed: Tensor | None  # (N, M) without attention: the fixed context of every step
    pending: Pending | None  # of the previous step, if this step reads its posterior


class SourceState(NamedTuple):
    """What an attention and its decoder read of the source. Hypotheses of a sentence share its row unless the attention
    reads the past."""

    memory: Memory
    past: Past
    words: Tensor | None  # (B, S, E) the embedded source, for the lexical model
    tokens: Tensor | None  # int64 (B, S) the source's tokens for a copy gate, NEVER for those that are not copied
    contexts: Tensor | None  # (B, S, P) of each source position, for predictions that sum over them


class DecoderState(NamedTuple):
    """What one step passes to the next, and what all steps of a sentence share."""

    hypothesis: HypothesisState
    source: SourceState | None  # without attention None
    products: Products
    shares_source: bool = False  # do hypotheses of one sentence share its row of `source`?

    def attended_source(self) -> SourceState:
        """The source of a decoder that attends."""
        assert self.source is not None
        return self.source

    def memory_and_past(self) -> tuple[Memory, Past]:
        """Memory and past of a decoder that attends."""
        source = self.attended_source()
        return source.memory, source.past

    def steered(self, steering: Steering) -> Self:
        """Steer the attention at some steps; to be called before the first one."""
        return self._with_memory(lambda memory: memory.steered(steering))

    def detailed(self) -> Self:
        """Make the attention return its detail."""
        return self._with_memory(lambda memory: memory._replace(detailed=True))

    def _with_memory(self, change: Callable[[Memory], Memory]) -> Self:
        if self.source is None:
            return self
        return self._replace(source=self.source._replace(memory=change(self.source.memory)))

    def select(self, index: Tensor) -> Self:
        """Take the rows `index` of the batch, which may repeat, in evaluation: dropout masks stay those of the whole
        batch."""
        return self._replace(hypothesis=select(self.hypothesis, index), source=select(self.source, index))

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Reorder hypotheses. Rows are grouped by sentence, with equally many for each.

        sentences: those to keep, by default all. What their hypotheses share is stored once.
        """
        if not self.shares_source:
            return self.select(index)
        source = self.source if sentences is None else select(self.source, sentences)
        return self._replace(hypothesis=select(self.hypothesis, index), source=source)
