"""Attention, composed of its parts.

Shapes: B batch, S source positions, T target positions, K hypotheses of a sentence, W window, Q query, M memory,
A attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nmt.attention.alignment import ExpectedAlignment
from nmt.attention.memory import Attended, Choice, Detail, Memory, Past, join_steps
from nmt.attention.monotonic import Chunk
from nmt.attention.parts import Aligned, Alignment, Coverage, KeyUpdate, Normalized, Normalizer, Score, Window
from nmt.ops.dropout import dropout
from nmt.ops.linear import product
from nmt.ops.precision import in_autocast_dtype, wide
from nmt.ops.rows import rows
from nmt.ops.shared import loop


class Attention(nn.Module):
    """context_t = sum_s w_ts h_s, with w = alignment(normalizer(score(query, keys), window))   (Bahdanau et al. 2015,
    eq. 5)."""

    def __init__(
        self,
        score: Score,
        window: Window,
        normalizer: Normalizer,
        alignment: Alignment | None = None,
        coverage: Coverage | None = None,
        dropout: float = 0.0,
        chunk: Chunk | None = None,
    ) -> None:
        """alignment: None: the expected one; dropout: on the weights, in the context only; chunk: after a monotonic
        normalizer."""
        super().__init__()
        self.score, self.window, self.normalizer, self.coverage = score, window, normalizer, coverage
        self.alignment, self.chunk = alignment or ExpectedAlignment(), chunk
        self.dropout = dropout
        self.reads_past = score.reads_past or normalizer.reads_past or coverage is not None

    def remember(
        self, states: Tensor, valid: Tensor, values: Tensor | None = None, *, nonempty: bool = False
    ) -> Memory:
        """(B, S, M), bool (B, S) -> Memory, with keys computed once per sentence.

        The context is a weighted sum of `values`; None: of the states. nonempty: every sentence has a valid position;
        then the mask is also made once per sentence where the parts allow it.
        """
        values = in_autocast_dtype(states if values is None else values)  # cast once, not at every step
        keys, projections = self.score.keys(states), [self.score.key_projection()]
        if self.coverage is not None:
            keys = self.coverage.keys(keys)
            projections.append(self.coverage.key_projection())
        valid = self.score.within_reach(valid)
        mask = None
        if nonempty and self.window.reach is None and self.normalizer.takes_masked:
            zeros = wide(torch.zeros_like(valid, dtype=values.dtype))
            mask = zeros.masked_fill(~valid, torch.finfo(zeros.dtype).min)[:, None]
        memory = Memory(values, keys, valid, mask, _side_by_side(projections))
        if self.chunk is None:
            return memory
        score = self.chunk.score
        return memory._replace(chunk_keys=score.keys(states), chunk_projection=score.key_projection())

    def start(self, valid: Tensor) -> Past:
        """bool (B, S) -> the past before the first step."""
        return Past.start(valid)

    def drop(self, weights: Tensor, memory: Memory) -> Tensor:
        """(B, T, S) -> the weights of a context, after dropout, in the precision of the values."""
        return dropout(weights, self.dropout, self.training).to(memory.values.dtype)

    def sequence(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        """Queries (B, T, Q) of T successive steps of each sentence -> Attended."""
        if self.reads_past:
            return self._step_by_step(query, memory, past)
        steps = range(past.step, past.step + query.shape[1])
        return self._attend(query, memory, past, steps)._replace(past=past._replace(step=steps.stop))

    def step(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        """Queries (B, K, Q) of K hypotheses of each sentence, all at one step -> Attended, with K for T.

        If the attention reads the past, K = 1, as each hypothesis has its own past.
        """
        assert query.shape[1] == 1 or not self.reads_past
        past = self.score.move(query, past)
        attended = self._attend(query, memory, past, range(past.step, past.step + 1))
        if self.reads_past:
            return attended._replace(past=past.after(attended.weights, attended.log_stops))
        return attended._replace(past=past._replace(step=past.step + 1))

    def _step_by_step(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        steps: list[Attended] = []
        with loop():
            for query_t in query.unbind(1):
                steps.append(self.step(query_t[:, None], memory, past))
                past = steps[-1].past
        return join_steps(steps)

    def _attend(self, query: Tensor, memory: Memory, past: Past, steps: range) -> Attended:
        """(B, T, Q), their T steps or one step for all -> Attended, with the past unchanged."""
        centre = None
        if self.window.reach is not None:
            centre = self.window.centre(query, memory.valid, steps)
        needs_all_positions = memory.steering is not None or memory.detailed
        if not needs_all_positions and self._reads_windows(memory.valid.shape[1]):
            assert centre is not None
            return self._attend_window(query, memory, past, centre)
        return self._attend_all(query, memory, past, centre, steps)

    def _key_update(self, memory: Memory, past: Past) -> KeyUpdate | None:
        if memory.projection is None:
            return None
        covered = None if self.coverage is None else self.coverage.key_features(past)
        features = _side_by_side([self.score.key_features(past), covered])
        assert features is not None
        return KeyUpdate(features, memory.projection)

    def _chunk_energies(self, score: Score, query: Tensor, memory: Memory, past: Past) -> Tensor:
        """(B, T, Q) -> (B, T, S)."""
        assert memory.chunk_keys is not None
        features, projection = score.key_features(past), memory.chunk_projection
        update = None if features is None or projection is None else KeyUpdate(features, projection)
        energies: Tensor = score(query, memory.chunk_keys, update)
        return energies

    def _attend_all(self, query: Tensor, memory: Memory, past: Past, centre: Tensor | None, steps: range) -> Attended:
        """Attends over all positions; a window is a mask over them."""
        keep, falloff = memory.valid[:, None], None
        if centre is not None:
            offsets = torch.arange(keep.shape[-1], device=keep.device) - centre[:, :, None]
            keep, falloff = keep & self.window.holds(offsets), self.window.falloff(offsets)
        energies = self.score(query, memory.keys, self._key_update(memory, past))
        if memory.mask is None:
            distribution = self._scaled(self.normalizer(energies, keep, past), falloff)
        else:
            distribution = self.normalizer(energies + memory.mask, None, past)
        log_stops = distribution.log_weights
        if self.chunk is not None:
            distribution = self.chunk(log_stops, self._chunk_energies(self.chunk.score, query, memory, past), keep)
        aligned = self.alignment(distribution)
        if memory.steering is not None:
            aligned = aligned._replace(weights=memory.steering.weights_at(steps, aligned.weights))
            if self.normalizer.stops:
                assert log_stops is not None
                log_stops = memory.steering.log_stops_at(steps, log_stops)
        context = product(self.drop(aligned.weights, memory), memory.values)
        stops = log_stops if self.normalizer.stops else None
        return Attended(
            context,
            aligned.weights,
            past,
            distribution.log_weights,
            log_stops,
            _choice(aligned, query),
            Detail.of(aligned.weights, centre, stops) if memory.detailed else None,
        )

    def _attend_window(self, query: Tensor, memory: Memory, past: Past, centre: Tensor) -> Attended:
        """The same for a window much narrower than the sentence: reads only the window's positions."""
        B, T, Q = query.shape
        S = memory.valid.shape[1]
        positions = self._positions(centre, S)  # (B, T, W)
        W = positions.shape[-1]
        index = (positions + S * torch.arange(B, device=query.device)[:, None, None]).flatten()
        values, keys = (rows(tensor, index).view(B * T, W, -1) for tensor in (memory.values, memory.keys))
        update = self._key_update(memory, past)
        if update is not None:
            update = update._replace(features=rows(update.features, index).view(B * T, W, -1))
        energies = self.score(query.reshape(B * T, 1, Q), keys, update).view(B, T, W)
        offsets = positions - centre[:, :, None]
        keep = memory.valid.flatten()[index].view(B, T, W) & self.window.holds(offsets)
        distribution = self._scaled(self.normalizer(energies, keep, past), self.window.falloff(offsets))
        aligned = self.alignment(distribution)
        context = torch.bmm(self.drop(aligned.weights, memory).view(B * T, 1, W), values)

        def everywhere(part: Tensor, outside: float) -> Tensor:
            return part.new_full((B, T, S), outside).scatter(-1, positions, part)

        log_weights = distribution.log_weights
        return Attended(
            context.view(B, T, -1),
            everywhere(aligned.weights, 0.0),
            past,
            None if log_weights is None else everywhere(log_weights, -torch.inf),
            choice=_choice(aligned, query),
        )

    def _scaled(self, normalized: Normalized, falloff: Tensor | None) -> Normalized:
        """The distribution times the window's falloff, summing to 1 again if the alignment needs that."""
        if falloff is None:
            return normalized
        weights, log_weights = normalized.weights * falloff, normalized.log_weights
        if log_weights is not None:
            inside = log_weights != -torch.inf
            log_weights = log_weights + torch.where(inside, falloff, 1.0).log()
        if not self.alignment.needs_distribution:
            return Normalized(weights, log_weights)
        total = weights.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        return Normalized(weights / total, None if log_weights is None else log_weights - total.log())

    def _width(self) -> int:
        """W: the positions read, which cover the window around any centre, also one between two positions."""
        assert self.window.reach is not None
        return 2 * self.window.reach + 2

    def _reads_windows(self, length: int) -> bool:
        """Is a window so much narrower than the sentence that reading only its positions is faster?"""
        return self.window.reach is not None and 2 * self._width() <= length

    def _positions(self, centre: Tensor, length: int) -> Tensor:
        """(B, T) -> int64 (B, T, W): positions in the sentence, among them all within reach of the centre."""
        assert self.window.reach is not None
        first = (centre.detach().floor().long() - self.window.reach).clamp(0, length - self._width())
        return first[:, :, None] + torch.arange(self._width(), device=centre.device)


def _side_by_side(parts: Sequence[Tensor | None]) -> Tensor | None:
    """(..., F) each -> (..., sum of F), None without any."""
    present = [part for part in parts if part is not None]
    if len(present) < 2:  # noqa: PLR2004
        return present[0] if present else None
    return torch.cat(present, dim=-1)


def _choice(aligned: Aligned, query: Tensor) -> Choice | None:
    if aligned.log_prob is None or aligned.entropy is None:
        return None
    return Choice(aligned.log_prob, aligned.entropy, query)
