"""The state of the decoder between its steps.

Shapes: B batch, S source positions, E embedding, M memory, R readout, P what its activation gets, G gates x H.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from nmt.attention.memory import Memory, Past
from nmt.attention.steering import Steering
from nmt.model.cells import CellState, LayerWeights, Recurrent, input_gates
from nmt.model.latent.mixture import Pending
from nmt.model.readout import Readout
from nmt.ops.linear import linear


class Weights(Protocol):
    """The decoder's weights for a batch, and the products of a step with them."""

    @property
    def layers(self) -> Sequence[LayerWeights]:
        """The weights of each recurrent layer, the lowest first."""
        ...

    @property
    def conditional(self) -> LayerWeights | None:
        """The weights of the second half of a conditional step."""
        ...

    @property
    def word_mask(self) -> Tensor | None:
        """The dropout mask of the embeddings (B, E)."""
        ...

    @property
    def readout_mask(self) -> Tensor | None:
        """The dropout mask of the readout (B, R)."""
        ...

    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        """The contribution of previous words and of `fixed` to the lowest layer's gates, (..., G)."""
        ...

    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        """The contribution (B, G) of what the step itself computes: of the context, if the decoder attends before the
        step, and of the previous readout (B, R), if it is fed back."""
        ...

    def conditional_gates(self, rnn: Recurrent, context: Tensor) -> Tensor:
        """The context's gates (B, G) in the second half of a conditional step."""
        ...

    def upper_input(self, context: Tensor) -> Tensor:
        """What the layers above the first read of the context, (B, M)."""
        ...

    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """Outputs (..., H) of the top layer, contexts, words -> readouts (..., R), before dropout."""
        ...

    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        """Outputs (..., H), words -> what the readout's activation gets, without a context, (..., P)."""
        ...

    def contexts(self, values: Tensor) -> Tensor:
        """The values of a memory (B, S, ...) -> what each position adds to that as a context, (B, S, P)."""
        ...


class BatchWeights(NamedTuple):
    """Parameters in the precision of the computation and dropout masks, prepared once per batch for all steps.

    Words are embeddings (..., E), contexts are (..., M).
    """

    layers: list[LayerWeights]
    # Columns of the first layer's weight_ih, by what they multiply.
    word: Tensor  # (G, E): the previous word
    fixed: Tensor  # (G, M or 0): the fixed vector
    fed: Tensor  # (G, ...): what the step itself computes, that is context and previous readout
    conditional: LayerWeights | None
    readout: Readout
    word_mask: Tensor | None = None  # (B, E)
    readout_mask: Tensor | None = None  # (B, R)
    table: Tensor | None = None  # (V, R) of the output layer; None before the first step of a search
    readout_parts: tuple[Tensor, Tensor] | None = None  # (P, H + E), (P, M): without and for a context alone

    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        """See Weights. Includes the bias unless layer normalisation adds it later."""
        first = self.layers[0]
        gates = linear(word, self.word, first.bias_ih if first.norms is None else None)
        if fixed is not None:
            of_fixed = linear(fixed, self.fixed)
            gates = gates + (of_fixed[:, None] if word.dim() == 3 else of_fixed)  # noqa: PLR2004
        return gates

    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        """See Weights."""
        if context is None or feed is None:
            fed = feed if context is None else context
        else:
            fed = torch.cat([context, feed], dim=1)
        return None if fed is None else linear(fed, self.fed)

    def conditional_gates(self, rnn: Recurrent, context: Tensor) -> Tensor:
        """See Weights."""
        assert self.conditional is not None
        return input_gates(rnn, self.conditional, context)

    def upper_input(self, context: Tensor) -> Tensor:
        """See Weights."""
        return context

    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """See Weights."""
        readout: Tensor = self.readout(output, context, word)
        return readout

    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        """See Weights."""
        assert self.readout_parts is not None
        inputs = torch.cat([output, word], dim=-1) if self.readout.sizes[2] else output
        return linear(inputs, self.readout_parts[0], self.readout.proj.bias)

    def contexts(self, values: Tensor) -> Tensor:
        """See Weights."""
        assert self.readout_parts is not None
        return linear(values, self.readout_parts[1])


class DecoderState(NamedTuple):
    """What one step passes to the next, and what all steps of a sentence share."""

    cell: CellState
    feed: Tensor | None  # (B, R) the previous readout, with input feeding
    past: Past | None  # of the attention, if there is one
    memory: Memory | None  # of the attention, if there is one
    words: Tensor | None  # (B, S, E) the embedded source, for the lexical model
    source: Tensor | None  # int64 (B, S) the source's tokens for a copy gate, NEVER for those that are not copied
    fixed: Tensor | None  # (B, M) without attention: the fixed context of every step
    weights: Weights  # of all steps
    contexts: Tensor | None  # (B, S, P) of each source position, for predictions that sum over them
    pending: Pending | None  # of the previous step, if this step reads its posterior
    beams_share_memory: bool  # do hypotheses of one sentence share its row of past, memory, words and source?

    def attention(self) -> tuple[Memory, Past]:
        """Memory and past of a decoder that attends."""
        assert self.memory is not None
        assert self.past is not None
        return self.memory, self.past

    def steered(self, steering: Steering) -> Self:
        """The same before the first step, with the attention steered at some steps."""
        return self if self.memory is None else self._replace(memory=self.memory.steered(steering))

    def detailed(self) -> Self:
        """The same with an attention that returns its detail."""
        return self if self.memory is None else self._replace(memory=self.memory._replace(detailed=True))

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, which may repeat, in evaluation: dropout masks stay those of the whole batch."""
        return self._own_rows(index)._shared_rows(index)

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Reorder hypotheses. Rows are grouped by sentence, with equally many for each.

        `sentences`: those to keep (None: all). What their hypotheses share is stored once if the attention allows it.
        """
        state = self._own_rows(index)
        if not self.beams_share_memory:
            return state._shared_rows(index)
        return state if sentences is None else state._shared_rows(sentences)

    def _own_rows(self, index: Tensor) -> Self:
        return self._replace(
            cell=self.cell.select(index),
            feed=None if self.feed is None else self.feed.index_select(0, index),
            fixed=None if self.fixed is None else self.fixed.index_select(0, index),
            pending=None if self.pending is None else self.pending.select(index),
        )

    def _shared_rows(self, index: Tensor) -> Self:
        return self._replace(
            past=None if self.past is None else self.past.select(index),
            memory=None if self.memory is None else self.memory.select(index),
            words=None if self.words is None else self.words.index_select(0, index),
            source=None if self.source is None else self.source.index_select(0, index),
            contexts=None if self.contexts is None else self.contexts.index_select(0, index),
        )
