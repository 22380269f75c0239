"""Attention put together from its parts.

Shapes: B batch, S source positions, T target positions, W window, Q query, M memory, A attention.
"""

import torch
from torch import Tensor, nn

from nmt.attention.memory import Attended, Choice, Memory, Past
from nmt.attention.parts import Coverage, Normalizer, Score, Window
from nmt.ops.dropout import dropout
from nmt.ops.linear import product
from nmt.ops.rows import rows
from nmt.ops.shared import in_autocast_dtype, loop


class Attention(nn.Module):
    """context_t = sum_s w_ts h_s, with w = normalizer(score(query, keys), window)   (Bahdanau et al. 2015, eq. 5)."""

    def __init__(
        self,
        score: Score,
        window: Window,
        normalizer: Normalizer,
        coverage: Coverage | None = None,
        dropout: float = 0.0,
    ) -> None:
        """dropout: on the weights, as the context sees them."""
        super().__init__()
        self.score, self.window, self.normalizer, self.coverage = score, window, normalizer, coverage
        self.dropout = dropout
        self.reads_past = score.reads_past or normalizer.reads_past or coverage is not None
        self.folds = not self.reads_past and not window.reads_step  # may T queries be of one and the same step?

    def remember(self, states: Tensor, valid: Tensor, values: Tensor | None = None) -> Memory:
        """(B, S, M), bool (B, S) -> Memory: the keys are made from the states here, once per sentence.

        `values` are what the context is a sum of; None: the states.
        """
        values = in_autocast_dtype(states if values is None else values)  # here once, not at every step
        return Memory(values, self.score.keys(states), self.score.within_reach(valid))

    def start(self, valid: Tensor) -> Past:
        """bool (B, S) -> the past before the first step."""
        return Past.start(valid)

    def forward(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        """(B, T, Q), Memory, Past -> Attended."""
        if self.reads_past and query.shape[1] > 1:
            return self._step_by_step(query, memory, past)
        centre = None
        if self.window.reach is not None:
            centre = self.window.centre(query, memory.valid, past)
        if self._reads_windows(memory.valid.shape[1]):
            assert centre is not None
            context, weights, choice = self._attend_window(query, memory, past, centre)
        else:
            context, weights, choice = self._attend_all(query, memory, past, centre)
        past = past.after(weights) if self.reads_past else past._replace(step=past.step + query.shape[1])
        return Attended(context, weights, past, choice)

    def _step_by_step(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        steps: list[Attended] = []
        with loop():
            for one in query.unbind(1):
                steps.append(self(one[:, None], memory, past))
                past = steps[-1].past
        choices = [step.choice for step in steps if step.choice is not None]
        return Attended(
            torch.cat([step.context for step in steps], dim=1),
            torch.cat([step.weights for step in steps], dim=1),
            past,
            Choice(*(torch.cat(parts, dim=1) for parts in zip(*choices, strict=True))) if choices else None,
        )

    def _keys(self, memory: Memory, past: Past) -> Tensor:
        keys = self.score.adjust(memory.keys, past) if self.score.reads_past else memory.keys
        return keys if self.coverage is None else self.coverage(keys, past)

    def _attend_all(
        self, query: Tensor, memory: Memory, past: Past, centre: Tensor | None
    ) -> tuple[Tensor, Tensor, Choice | None]:
        """All positions, a window being a mask over them."""
        keep, falloff = memory.valid[:, None], None
        if centre is not None:
            offsets = torch.arange(keep.shape[-1], device=keep.device) - centre[:, :, None]
            keep, falloff = keep & self.window.holds(offsets), self.window.falloff(offsets)
        energies = self.score(query, self._keys(memory, past))
        weights, choice = self._weigh(energies, keep, past, falloff, query)
        return product(self._dropped(weights, memory), memory.values), weights, choice

    def _attend_window(
        self, query: Tensor, memory: Memory, past: Past, centre: Tensor
    ) -> tuple[Tensor, Tensor, Choice | None]:
        """The same for a window much narrower than the sentence: only what lies in it is read."""
        B, T, Q = query.shape
        S = memory.valid.shape[1]
        positions = self._positions(centre, S)  # (B, T, W)
        W = positions.shape[-1]
        index = (positions + S * torch.arange(B, device=query.device)[:, None, None]).flatten()
        values, keys = rows(memory.values, index), rows(self._keys(memory, past), index)
        energies = self.score(query.reshape(B * T, 1, Q), keys.view(B * T, W, -1)).view(B, T, W)
        offsets = positions - centre[:, :, None]
        keep = memory.valid.flatten()[index].view(B, T, W) & self.window.holds(offsets)
        weights, choice = self._weigh(energies, keep, past, self.window.falloff(offsets), query)
        context = torch.bmm(self._dropped(weights, memory).view(B * T, 1, W), values.view(B * T, W, -1))
        everywhere = weights.new_zeros(B, T, S).scatter(-1, positions, weights)
        return context.view(B, T, -1), everywhere, choice

    def _weigh(
        self, energies: Tensor, keep: Tensor, past: Past, falloff: Tensor | None, query: Tensor
    ) -> tuple[Tensor, Choice | None]:
        weights, log_prob, entropy = self.normalizer(energies, keep, past)
        choice = None
        if log_prob is not None and entropy is not None:
            choice = Choice(log_prob, entropy, query)
        return weights if falloff is None else weights * falloff, choice

    def _dropped(self, weights: Tensor, memory: Memory) -> Tensor:
        return dropout(weights, self.dropout, self.training).to(memory.values.dtype)

    def _width(self) -> int:
        """W: positions read around a centre that lies anywhere between two of them."""
        assert self.window.reach is not None
        return 2 * self.window.reach + 2

    def _reads_windows(self, length: int) -> bool:
        """Is a window so much narrower than the sentence that reading it alone is worth while?"""
        return self.window.reach is not None and 2 * self._width() <= length

    def _positions(self, centre: Tensor, length: int) -> Tensor:
        """(B, T) -> int64 (B, T, W), in the sentence, with all those within reach of the centre among them."""
        assert self.window.reach is not None
        first = (centre.detach().floor().long() - self.window.reach).clamp(0, length - self._width())
        return first[:, :, None] + torch.arange(self._width(), device=centre.device)
