"""Attention with one head and with several, which joins a score, a window, a normalizer and an alignment.

Shapes: B batch, S source positions, T target positions, K hypotheses of a sentence, W source positions in a window,
Q size of a query, M size of a value, A size of a key, F features, N heads, d size of a head, L steps that may be
steered.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from nmt.attention.alignment import Aligned, Alignment, Choice
from nmt.attention.normalizers import Chunk, Normalized, Normalizer
from nmt.attention.scores import KeyUpdate, LinearCoverage, Past, Score
from nmt.attention.windows import LocalWindow, Window
from nmt.ops.draws import dropout
from nmt.ops.products import Linear, defer, deferring, gather_rows, in_autocast_dtype, product, wide
from nmt.ops.trees import join, map_tensors, select


class Steering(NamedTuple):
    """Attention weights that replace the computed weights at some of the first L steps."""

    weights: Tensor  # (B, L, S), read only at steered steps
    steered: Tensor  # (B, L) bool, True at the steps where `weights` replaces the computed weights

    def replace(self, steps: range, weights: Tensor) -> Tensor:
        """Replace the weights (B, T, S) at steered steps. The T rows of a sentence belong to successive `steps`, or if
        `steps` has length 1, to T hypotheses at this step."""
        if steps.start >= self.steered.shape[1]:
            return weights
        within = slice(steps.start, steps.stop)
        rows, steered = self.weights[:, within].to(weights.dtype), self.steered[:, within, None]
        if len(steps) == 1:
            return torch.where(steered, rows, weights)
        replaced = torch.where(steered, rows, weights[:, : rows.shape[1]])
        return torch.cat([replaced, weights[:, rows.shape[1] :]], dim=1)

    def replace_stops(self, steps: range, log_stops: Tensor) -> Tensor:
        """Replace the log-probabilities (B, T, S) that monotonic reading stops at each position: a steered step stops
        at the last position to which it gives weight."""
        attended = self.weights > 0
        last = attended & (attended.flip(-1).cumsum(-1).flip(-1) == 1)
        return Steering(last.to(log_stops.dtype).log(), self.steered).replace(steps, log_stops)


class Memory(NamedTuple):
    """The encoded source sentences. With N heads, each sentence has N consecutive rows in the batch axis B."""

    # (B, S, M) vectors whose weighted sum is a context: encoder states, or their projections for a head
    values: Tensor
    keys: Tensor  # (B, S, A) projections of the encoder states for the score, computed once per sentence
    valid: Tensor  # (B, S) bool, True where a position may be attended to
    mask: Tensor | None = None  # (B, 1, S) added to energies: 0 where valid, else the lowest finite number
    projection: Tensor | None = None  # (A, F) factor P of the `KeyUpdate`; None if there is no update of the keys
    heads: int = 1  # number N of heads
    chunk_keys: Tensor | None = None  # (B, S, A) keys of the second score of monotonic chunkwise attention, see `Chunk`
    chunk_projection: Tensor | None = None  # (A, F) factor P of the second score's `KeyUpdate`
    steering: Steering | None = None  # weights that replace the computed weights at some steps
    detailed: bool = False  # True if steps that read this memory also return `Attended.detail`

    @property
    def sentences(self) -> int:
        """Return the number of sentences, which is B / N."""
        return self.valid.shape[0] // self.heads

    def select(self, index: Tensor) -> Self:
        """Take the sentences with these indices, an int64 vector. The rows of all heads of a sentence stay together."""
        if self.heads > 1:
            index = (index[:, None] * self.heads + torch.arange(self.heads, device=index.device)).flatten()
        by_sentence = ("values", "keys", "valid", "mask", "chunk_keys", "steering")
        return self._replace(**{name: select(getattr(self, name), index) for name in by_sentence}).deferred()

    def deferred(self) -> Self:
        """Return the memory for a loop over steps, which defers the gradients of values and keys to its end."""
        (values,), (keys,), (chunk_keys,) = (defer(t, cast=False) for t in (self.values, self.keys, self.chunk_keys))
        return self._replace(values=values, keys=keys, chunk_keys=chunk_keys)

    def steered(self, steering: Steering) -> Self:
        """Return a memory with this `steering`, which has one row for each sentence. All heads use the row of
        their sentence."""
        return self._replace(steering=map_tensors(lambda part: part.repeat_interleave(self.heads, dim=0), steering))


class Detail(NamedTuple):
    """What each head of an attention did. (`Attended.weights` has only the mean of the heads.)"""

    heads: Tensor  # (B, N, T, S) attention weights of each head
    centres: Tensor | None  # (B, N, T) centre of the local window, a source position from 0
    # (B, N, T) int64: source position from 0 where monotonic reading stopped, or with expected weights where it most
    # probably stopped; -1 past the end
    stops: Tensor | None


class Attended(NamedTuple):
    """The result of one or more steps of attention."""

    context: Tensor  # (B, T, M)
    weights: Tensor  # (B, T, S), the mean over all heads
    past: Past  # what the next step reads about earlier steps
    log_weights: Tensor | None = None  # (B, T, S) logarithms of the weights, -inf where a weight is exactly 0
    log_stops: Tensor | None = None  # (B, T, S) log-probability that monotonic reading stops at each position
    choice: Choice | None = None  # what hard attention sampled in training
    detail: Detail | None = None  # what each head did; present if `Memory.detailed`


def join_steps(steps: Sequence[Attended]) -> Attended:
    """Join the results of successive steps (T = 1 each) along T, with the past of the last result. `log_stops`, which
    only the next step needs, is left out."""
    context, weights, pasts, log_weights, _, choices, details = zip(*steps, strict=True)
    return Attended(
        torch.cat(context, dim=1),
        torch.cat(weights, dim=1),
        pasts[-1],
        None if log_weights[0] is None else torch.cat(log_weights, dim=1),
        choice=None if choices[0] is None else join(choices, 1),
        detail=None if details[0] is None else join(details, 2),
    )


class Attention(nn.Module):
    """Computes context_t = sum_s w_ts h_s, with w_t = alignment(falloff_t * normalizer(score(q_t, keys), window))
    (Bahdanau et al. 2015, eq. 5).

    h_s is the encoder state of source position s, and q_t the query of target position t. The factors falloff_t come
    from the window; only `LocalPredictiveWindow` has such factors.
    """

    def __init__(
        self,
        score: Score,
        window: Window,
        normalizer: Normalizer,
        alignment: Alignment | None = None,
        coverage: LinearCoverage | None = None,
        dropout: float = 0.0,
        chunk: Chunk | None = None,
        reads_past: bool = False,
    ) -> None:
        """alignment: None for soft attention, where w_t = falloff_t * normalizer(...). dropout: probability of dropping
        a weight from the context; the returned weights have no dropout. chunk: spreads each weight of a monotonic
        normalizer over a chunk of positions. reads_past: True if the score, normalizer or coverage depends on what
        earlier steps attended to."""
        super().__init__()
        assert reads_past or (coverage is None and score.key_projection() is None)
        self.score, self.window, self.normalizer, self.coverage = score, window, normalizer, coverage
        self.alignment, self.chunk, self.dropout, self.reads_past = alignment, chunk, dropout, reads_past

    def remember(
        self, states: Tensor, valid: Tensor, values: Tensor | None = None, *, nonempty: bool = False
    ) -> Memory:
        """Make the memory, with keys that are computed once per sentence: states (B, S, M), bool (B, S) -> Memory.

        values: the vectors whose weighted sum is the context, by default the states. nonempty: True if every sentence
        is known to have a valid position. Then `Memory.mask` is set if the window and the normalizer can use it.
        """
        values = in_autocast_dtype(states if values is None else values)  # cast once, not at every step
        keys, projection = self.score.keys(states), _cat(part.key_projection() for part in self._changing_keys())
        keys = keys if self.coverage is None else self.coverage.keys(keys)
        valid = self.score.defined_at(valid)
        mask = None
        if nonempty and self.window.reach is None and self.normalizer.takes_masked:
            zeros = wide(torch.zeros_like(valid, dtype=values.dtype))
            mask = zeros.masked_fill(~valid, torch.finfo(zeros.dtype).min)[:, None]
        memory = Memory(values, keys, valid, mask, projection)
        if self.chunk is None:
            return memory
        score = self.chunk.score
        return memory._replace(chunk_keys=score.keys(states), chunk_projection=score.key_projection())

    def drop(self, weights: Tensor, memory: Memory) -> Tensor:
        """Apply dropout to the weights of a context: (B, T, S) -> (B, T, S), in the dtype of the values."""
        return dropout(weights, self.dropout, self.training).to(memory.values.dtype)

    def sequence(self, query: Tensor, memory: Memory, past: Past | None = None) -> Attended:
        """Attend at T successive steps of each sentence: queries (B, T, Q) -> Attended. Without a past, the first query
        is that of the first step."""
        past = Past.initial(memory.valid) if past is None else past
        if not self.reads_past:
            steps = range(past.step, past.step + query.shape[1])
            return self._attend(query, memory, past, steps)._replace(past=past._replace(step=steps.stop))
        attended, memory = list[Attended](), memory.deferred()
        with deferring(self):
            for query_t in query.unbind(1):
                attended.append(self.step(query_t[:, None], memory, past))
                past = attended[-1].past
        return join_steps(attended)

    def step(self, query: Tensor, memory: Memory, past: Past | None = None) -> Attended:
        """Attend at one step with K hypotheses per sentence: queries (B, K, Q) -> Attended, whose axis T has length K.
        Without a past, it is the first step.

        If the attention reads the past, K must be 1, because a row of the batch has only one past.
        """
        assert query.shape[1] == 1 or not self.reads_past
        past = self.score.update_past(query, Past.initial(memory.valid) if past is None else past)
        attended = self._attend(query, memory, past, range(past.step, past.step + 1))
        if self.reads_past:
            return attended._replace(past=past.after(attended.weights, attended.log_stops))
        return attended._replace(past=past._replace(step=past.step + 1))

    def _attend(self, query: Tensor, memory: Memory, past: Past, steps: range) -> Attended:
        """Attend with queries (B, T, Q) of T steps, or of T hypotheses at one step. The past stays unchanged. A local
        window becomes a mask over all positions, unless it is much narrower than the sentence."""
        keep, centres, falloff = memory.valid[:, None], None, None
        if isinstance(window := self.window, LocalWindow):
            centres = window.centres(query, memory.valid, steps)
            needs_all_positions = memory.steering is not None or memory.detailed
            if not needs_all_positions and window.narrows(memory.valid.shape[1]):
                return self._attend_window(window, query, memory, past, centres)
            offsets = torch.arange(keep.shape[-1], device=keep.device) - centres[:, :, None]
            keep, falloff = keep & window.holds(offsets), window.falloff(offsets)
        update = _key_update(self._changing_keys(), memory.projection, past)
        energies = self.score(query, memory.keys, update)
        if memory.mask is None:
            distribution = self._scaled(self.normalizer(energies, keep, past), falloff)
        else:
            distribution = self.normalizer(energies + memory.mask, None, past)
        log_stops = distribution.log_weights if self.normalizer.stops else None
        if self.chunk is not None:
            assert memory.chunk_keys is not None
            update = _key_update([self.chunk.score], memory.chunk_projection, past)
            distribution = self.chunk(log_stops, self.chunk.score(query, memory.chunk_keys, update), keep)
        aligned = Aligned(distribution.weights) if self.alignment is None else self.alignment(distribution)
        if memory.steering is not None:
            aligned = aligned._replace(weights=memory.steering.replace(steps, aligned.weights))
            if log_stops is not None:
                log_stops = memory.steering.replace_stops(steps, log_stops)
        detail = None
        if memory.detailed:
            stops = None
            if log_stops is not None:
                stops = torch.where((log_stops > -torch.inf).any(-1), log_stops.argmax(-1), -1)[:, None]
            detail = Detail(aligned.weights[:, None], None if centres is None else centres[:, None], stops)
        return Attended(
            product(self.drop(aligned.weights, memory), memory.values),
            aligned.weights,
            past,
            distribution.log_weights,
            log_stops,
            None if aligned.log_prob is None else aligned.for_reinforce(query),
            detail,
        )

    def _attend_window(
        self, window: LocalWindow, query: Tensor, memory: Memory, past: Past, centres: Tensor
    ) -> Attended:
        """Attend within a window much narrower than the sentence, reading only the window's positions.

        centres: (B, T), the centre of each window. For a memory without steering, and no detail is asked for.
        """
        B, T, Q = query.shape
        S, W = memory.valid.shape[1], window.width
        positions = window.positions(centres, S)  # (B, T, W)
        index = (positions + S * torch.arange(B, device=query.device)[:, None, None]).flatten()
        values, keys = (gather_rows(tensor, index).view(B * T, W, -1) for tensor in (memory.values, memory.keys))
        update = _key_update(self._changing_keys(), memory.projection, past)
        if update is not None:
            update = update._replace(features=gather_rows(update.features, index).view(B * T, W, -1))
        energies = self.score(query.reshape(B * T, 1, Q), keys, update).view(B, T, W)
        offsets = positions - centres[:, :, None]
        keep = memory.valid.flatten()[index].view(B, T, W) & window.holds(offsets)
        distribution = self._scaled(self.normalizer(energies, keep, past), window.falloff(offsets))
        aligned = Aligned(distribution.weights) if self.alignment is None else self.alignment(distribution)
        context = torch.bmm(self.drop(aligned.weights, memory).view(B * T, 1, W), values)

        def spread(part: Tensor, outside: float) -> Tensor:
            return part.new_full((B, T, S), outside).scatter(-1, positions, part)

        log_weights = distribution.log_weights
        return Attended(
            context.view(B, T, -1),
            spread(aligned.weights, 0.0),
            past,
            None if log_weights is None else spread(log_weights, -torch.inf),
            choice=aligned.for_reinforce(query),
        )

    def _changing_keys(self) -> "list[Score | LinearCoverage]":
        """Return the parts that may change the keys at every step."""
        return [self.score] if self.coverage is None else [self.score, self.coverage]

    def _scaled(self, normalized: Normalized, falloff: Tensor | None) -> Normalized:
        """Multiply a distribution by the window's falloff. For an alignment, make the weights sum to 1 again."""
        if falloff is None:
            return normalized
        weights, log_weights = normalized.weights * falloff, normalized.log_weights
        if log_weights is not None:
            inside = log_weights != -torch.inf
            log_weights = log_weights + torch.where(inside, falloff, 1.0).log()
        if self.alignment is None:
            return Normalized(weights, log_weights)
        total = weights.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        return Normalized(weights / total, None if log_weights is None else log_weights - total.log())


def _key_update(parts: Iterable[Score | LinearCoverage], projection: Tensor | None, past: Past) -> KeyUpdate | None:
    """Join the features with which these parts change the keys into one update; None if no part changes them."""
    features = _cat(part.key_features(past) for part in parts)
    return None if features is None or projection is None else KeyUpdate(features, projection)


def _cat(tensors: Iterable[Tensor | None]) -> Tensor | None:
    """Concatenate along the last axis those tensors that are not None; None if all are."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present, dim=-1) if len(present) > 1 else next(iter(present), None)


class MultiHeadAttention(nn.Module):
    """Computes W_o [head_1; ...; head_N] with head_n = attention(W_q^n q, W_k^n h, W_v^n h)   (Vaswani et al. 2017,
    3.2.2), where q is the query, h are the encoder states, and the matrices W are learned.

    The heads share the parameters of `inner` and differ in their projections W_q, W_k and W_v. With one head, the class
    computes general query-key-value attention.
    """

    def __init__(self, inner: Attention, query_dim: int, memory_dim: int, dim: int, heads: int) -> None:
        """inner: the attention of every head, for queries and states of size d = dim / heads."""
        super().__init__()
        assert dim % heads == 0
        self.inner, self.heads, self.reads_past = inner, heads, inner.reads_past
        self.query_proj = Linear(query_dim, dim, bias=False)
        self.key_proj = Linear(memory_dim, dim, bias=False)
        self.value_proj = Linear(memory_dim, dim, bias=False)
        self.output_proj = Linear(dim, memory_dim, bias=False)

    def remember(self, states: Tensor, valid: Tensor, *, nonempty: bool = False) -> Memory:
        """Make the memory of all heads, as `Attention.remember` does: states (B, S, M), bool (B, S) -> Memory with
        B * N rows."""
        valid = valid[:, None].expand(-1, self.heads, -1).flatten(0, 1)
        keys, values = (self._fold(projection(states)) for projection in (self.key_proj, self.value_proj))
        return self.inner.remember(keys, valid, values, nonempty=nonempty)._replace(heads=self.heads)

    def sequence(self, query: Tensor, memory: Memory, past: Past | None = None) -> Attended:
        """Attend at T successive steps: queries (B, T, Q) -> Attended, whose weights are means over heads."""
        return self._join(self.inner.sequence(*self._by_head(query, memory, past)), query)

    def step(self, query: Tensor, memory: Memory, past: Past | None = None) -> Attended:
        """Attend at one step with K hypotheses per sentence, like `Attention.step`: queries (B, K, Q) -> Attended."""
        return self._join(self.inner.step(*self._by_head(query, memory, past)), query)

    def _by_head(self, query: Tensor, memory: Memory, past: Past | None) -> tuple[Tensor, Memory, Past | None]:
        """Project the queries, and move the heads of queries and past to the batch axis, as those of the memory are."""
        return self._fold(self.query_proj(query)), memory, map_tensors(lambda part: part.flatten(0, 1), past)

    def _join(self, attended: Attended, query: Tensor) -> Attended:
        """Join the heads, which lie in the batch axis: projected contexts side by side, and mean weights."""

        def unfold(folded: Tensor) -> Tensor:  # separates the heads from the batch axis: (B N, ...) -> (B, N, ...)
            return folded.view(-1, self.heads, *folded.shape[1:])

        context = unfold(attended.context).transpose(1, 2).flatten(2)
        log_weights, choice = attended.log_weights, attended.choice
        if log_weights is not None:
            # Where all heads have -inf, their mean is -inf, without a gradient.
            of_heads = unfold(log_weights)
            nowhere = (of_heads == -torch.inf).all(1)
            mean = of_heads.masked_fill(nowhere[:, None], 0.0).logsumexp(1) - math.log(self.heads)
            log_weights = mean.masked_fill(nowhere, -torch.inf)
        if choice is not None:
            choice = Choice(unfold(choice.log_prob).sum(1), unfold(choice.entropy).sum(1), query)
        weights, past = unfold(attended.weights).mean(1), map_tensors(unfold, attended.past)
        detail = map_tensors(lambda part: unfold(part.squeeze(1)), attended.detail)
        return Attended(self.output_proj(context), weights, past, log_weights, choice=choice, detail=detail)

    def _fold(self, projected: Tensor) -> Tensor:
        """Move the heads to the batch axis: (B, ..., N d) -> (B N, ..., d)."""
        return torch.stack(projected.chunk(self.heads, dim=-1), dim=1).flatten(0, 1)
