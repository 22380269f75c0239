"""Decoding with a latent source position: predictions that sum over it, its posterior, and an inference network.

Shapes: B batch, S source positions, T target positions or hypotheses of a sentence, E embedding, H hidden, M memory,
K positions in the sum, P what the readout's activation gets, R readout, N hypotheses.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from nmt.attention.alignment import sample_positions
from nmt.attention.attention import Attended, Attention, join_steps
from nmt.attention.normalizers import FirstOrderNormalizer
from nmt.attention.scores import GeneralScore
from nmt.model.decoder import (
    Decoded,
    Decoder,
    DecoderState,
    DecoderStep,
    Infer,
    Inferred,
    Pending,
)
from nmt.model.prediction import Mixture, Output, OutputLayer, Prediction
from nmt.model.recurrent import Recurrent, run_rnn
from nmt.ops.draws import draw
from nmt.ops.layers import Dropout, join, loop, map_tensors, product, rows, wide


class LatentPosition(NamedTuple):
    """How predictions sum over the source position."""

    top_k: int | None  # the number of most probable positions in the sum; None for all
    min_share: float = 0.0  # of the largest weight; positions with less are left out
    observed: bool = False  # do later steps read the posterior, given the token?
    prior_share: float = 0.0  # of the distribution in that posterior
    first_order: bool = False  # does the distribution depend on the previous position, and on nothing else of the past?

    def strongest(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, T, S) -> weights (B, T, K) of the most probable positions, summing to 1 again, and the positions."""
        positions = None
        if self.top_k is not None and weights.shape[-1] > self.top_k:
            weights, positions = weights.topk(self.top_k, dim=-1)
        elif not self.min_share:
            return weights, None
        if self.min_share:
            weights = weights.masked_fill(weights < self.min_share * weights.amax(-1, keepdim=True), 0.0)
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0), positions


class LatentDecoder(Decoder):
    """p(y_t) = sum_s a_ts p(y_t | h_s), the readout of each position computed from its own encoder state (Deng et al.
    2018, 2.1). Recurrent steps and what is fed back read the mean context, as in soft attention, or with
    `latent.observed` its posterior mean (Shankar and Sarawagi 2019)."""

    sums_over_positions = True
    attention: Attention  # several heads are refused with a latent position

    def __init__(self, *parts: Any, latent: LatentPosition, **options: Any) -> None:  # noqa: ANN401
        """parts, options: those of Decoder."""
        super().__init__(*parts, **options)
        self.latent = latent
        # Where steps read words alone and every position has a readout, all tokens' probabilities are known at once.
        at_once = self.attend == "after" and latent.top_k is None and not latent.min_share
        # Do the positions form a Markov chain given the words?
        self.chain = latent.first_order and at_once and not self.stepped and latent.observed and not latent.prior_share
        self.stepped = self.stepped or (latent.observed and not at_once)

    def teacher_force(
        self, embedded: Tensor, state: DecoderState, target: Tensor, output: Output, infer: Infer | None = None
    ) -> Decoded:
        """See Decoder."""
        mixture = inferred = None
        if self.stepped:
            layer = output.layer()
            steps = self._run_steps(embedded, state, lambda t, state: self.observe(state, target[:, t], layer))
            attended, outputs = join_steps([step.attended for step in steps if step.attended]), self._outputs(steps)
            readouts = self._readouts(steps, attended, embedded, state)
            if self.latent.observed:
                mixture = Mixture(*join([step.mixture.parts for step in steps if step.mixture is not None], 1))
        elif self.latent.observed:
            outputs, attended, mixture = self._filter(embedded, state, target, output.layer())
            readouts = self._read_out_all(outputs, attended, embedded, state)
        else:
            outputs, fused = self._run_fused(embedded, state)
            assert fused is not None
            attended, readouts = fused, self._read_out_all(outputs, fused, embedded, state)
        if infer is not None:
            inferred = infer(attended.weights)
            mixture, _ = self._mix(outputs, inferred.weights, embedded, state, averages_losses=True)
        if mixture is None:
            mixture, _ = self._mix(outputs, attended.weights, embedded, state)
        readouts = self._add_lexical(readouts, attended.weights, state)
        return Decoded(readouts, mixture, attended, inferred)

    def _filter(
        self, embedded: Tensor, state: DecoderState, target: Tensor, output: OutputLayer
    ) -> tuple[Tensor, Attended, Mixture]:
        """Run the forward algorithm: states depend on words alone, so one call gives the probabilities of all tokens
        from all positions, and the loop over steps only attends -> outputs (B, T, H), attention, mixture."""
        hidden, _ = self._run_words(embedded, state)
        memory, past = state.attended_source()[:2]
        B, T, S = *target.shape, memory.valid.shape[1]
        everywhere = memory.valid[:, None].expand(B, T, S).to(hidden.dtype)
        mixture, _ = self._mix(hidden, everywhere, embedded, state)
        log_probs = mixture.before_last().token_log_probs(output, target[:, 1:])
        steps = []
        with loop():
            for t, query in enumerate(hidden.unbind(1)):
                steps.append(self.attention.step(query[:, None], memory, past))
                past = steps[-1].past
                if t < T - 1:
                    weighted = Mixture(mixture.readouts, steps[-1].weights, mixture.positions)
                    past = past.corrected(self._posterior(weighted, log_probs[:, t : t + 1])[:, 0])
        attended = join_steps(steps)
        return hidden, attended, Mixture(mixture.readouts, attended.weights, mixture.positions)

    def step(self, word: Tensor, state: DecoderState) -> tuple[Prediction, Tensor | None, DecoderState]:
        """See Decoder. The prediction is a mixture grouped by sentence."""
        step = self._decode_step(state.products.word_gates(word, state.hypothesis.fixed), word, state)
        assert step.attended is not None
        weights = step.attended.weights[:, 0]
        mixture = step.mixture or self._mix(self._output(step.state.hypothesis.recurrent), weights, word, state)[0]
        return mixture, weights, step.state

    def observe(self, state: DecoderState, tokens: Tensor, output: OutputLayer) -> DecoderState:
        """See Decoder. What later steps read of the previous attention becomes its posterior (Shankar and Sarawagi
        2019, eq. 3 to 5)."""
        pending = state.hypothesis.pending
        if pending is None:
            return state
        source = state.attended_source()
        memory, past = source.memory, source.past
        by_sentence = (memory.sentences, -1)
        mixture = Mixture(*map_tensors(lambda part: part.view(*by_sentence, *part.shape[1:]), pending[:3]))
        posterior = self._posterior(mixture, mixture.token_log_probs(output, tokens))
        posterior = mixture.spread(posterior, memory.valid.shape[1])  # (B, T, S)
        feed = state.hypothesis.feed
        if self.input_feeding:
            assert source.contexts is not None
            context = product(self.attention.drop(posterior, memory), source.contexts).flatten(0, 1)
            feed = self.dropout(self.readout.activation(pending.partial + context))
        past = past.corrected(posterior[:, 0]) if self.attention.reads_past else past
        hypothesis = state.hypothesis._replace(feed=feed, pending=None)
        return state._replace(hypothesis=hypothesis, source=source._replace(past=past))

    def posterior(
        self, decoded: Decoded, embedded: Tensor, state: DecoderState, target: Tensor, counted: Tensor, output: Output
    ) -> Tensor | None:
        """See Decoder. Where the positions form a Markov chain given the words, the posterior given the whole target;
        else the posterior of each position given the target up to its token."""
        posterior, prior = super().posterior(decoded, embedded, state, target, counted, output), decoded.weights
        if not self.chain or state.attended_source().memory.steering is not None:
            return posterior
        assert posterior is not None
        assert prior is not None
        return self._smooth(posterior, prior, counted, embedded, state)

    def _smooth(
        self, posterior: Tensor, prior: Tensor, counted: Tensor, embedded: Tensor, state: DecoderState
    ) -> Tensor:
        """p(s_t | y_1 ... y_t), p(s_t | y_1 ... y_{t-1}) (B, T, S), bool (B, T) False on padding, (B, T, E) ->
        p(s_t | y_1 ... y_T) (B, T, S), by the backward pass of the forward-backward algorithm."""
        normalizer, memory = cast(FirstOrderNormalizer, self.attention.normalizer), state.attended_source().memory
        hidden, _ = self._run_words(embedded, state)
        energies, keep = self.attention.score(hidden, memory.keys), memory.valid[:, None]
        smoothed = [posterior[:, -1]]
        for t in range(prior.shape[1] - 1, 0, -1):
            later = smoothed[-1] / prior[:, t].masked_fill(prior[:, t] == 0, 1.0)
            later = later.masked_fill(~counted[:, t, None], 1.0)  # padding tells nothing of earlier positions
            transitions = normalizer.transitions(energies[:, t : t + 1], keep)
            smoothed.append(posterior[:, t - 1] * (transitions * later[:, None]).sum(-1))
        return torch.stack(smoothed[::-1], dim=1)

    def _posterior(self, mixture: Mixture, log_probs: Tensor) -> Tensor:
        """Log-probabilities (B, T, K) of the token -> what later steps read (B, T, K)."""
        posterior = mixture.posterior(log_probs)
        return torch.lerp(posterior, mixture.weights.to(posterior.dtype), self.latent.prior_share)

    def _decode_step(self, gates: Tensor, word: Tensor, state: DecoderState) -> DecoderStep:
        step = super()._decode_step(gates, word, state)
        if not self.latent.observed:
            return step
        assert step.attended is not None
        hypothesis = step.state.hypothesis
        mixture, partial = self._mix(self._output(hypothesis.recurrent), step.attended.weights[:, 0], word, state)
        pending = Pending(*map_tensors(lambda part: part.flatten(0, 1), mixture.parts), partial)
        state = step.state._replace(hypothesis=hypothesis._replace(pending=pending))
        return step._replace(mixture=mixture, state=state)

    def _mix(
        self, output: Tensor, weights: Tensor, word: Tensor, state: DecoderState, averages_losses: bool = False
    ) -> tuple[Mixture, Tensor]:
        """(B, T, H), (B, T, S), (B, T, E), or all without T and with rows grouped by sentence -> Mixture, and what the
        readout's activation gets without a context, (B T, P)."""
        source = state.attended_source()
        assert source.contexts is not None
        B = source.contexts.shape[0]
        output, weights, word = (part.reshape(B, -1, part.shape[-1]) for part in (output, weights, word))
        partial = state.products.read_out_partly(output, word)  # (B, T, P)
        strongest, positions = self.latent.strongest(weights)
        readouts: Tensor = self.dropout(self.readout.activation(_of_positions(partial, source.contexts, positions)))
        if state.products.lexical is not None:
            assert source.words is not None
            words = state.products.lexical.of_attended(source.words)  # (B, S, R)
            added = _of_positions(words.new_zeros(*partial.shape[:2], 1), words, positions)
            readouts = readouts + self.dropout(added.expand_as(readouts))
        return Mixture(readouts, strongest, positions, averages_losses), partial.flatten(0, 1)


class InferenceNetwork(nn.Module):
    """q(s | x, y) = softmax over s of g_t . W h_s, with g a bidirectional network over the whole target, and h the
    encoder's states   (Deng et al. 2018, 4; there with a separate encoder).

    The softmax is over the positions where the prior is above 0, so that the divergence from it is finite.
    """

    def __init__(self, rnn: Recurrent, memory_dim: int, dropout: Dropout, sample: bool) -> None:
        """sample: one position is drawn from q, instead of all."""
        super().__init__()
        self.rnn, self.dropout, self.sample = rnn, dropout, sample
        self.score = GeneralScore(2 * rnn.hidden_size, memory_dim)

    def forward(self, embedded: Tensor, lengths: Tensor, states: Tensor, prior: Tensor) -> Inferred:
        """y_1 ... y_T (B, T, E), int64 (B,), (B, S, M), (B, T, S) -> Inferred."""
        read, _ = run_rnn(self.rnn, embedded, lengths)
        energies = wide(self.score(self.dropout(read), self.score.keys(states)))
        nowhere = prior.detach() == 0
        log_q = energies.masked_fill(nowhere, torch.finfo(energies.dtype).min).log_softmax(-1)
        q = log_q.exp().masked_fill(nowhere, 0.0)
        log_probs = log_q.masked_fill(nowhere, -torch.inf)
        if not self.sample:
            return Inferred(log_probs, q, None)
        B, T, _ = q.shape
        position = sample_positions(q, draw(B, T, q.device))
        return Inferred(log_probs, position, (position * log_q.masked_fill(nowhere, 0.0)).sum(-1))


def _of_positions(partial: Tensor, contexts: Tensor, positions: Tensor | None) -> Tensor:
    """Compute what the activation gets for each source position: (B, T, P) without a context, (B, S, P) of each
    position's own state, int64 (B, T, K) or None -> (B, T, K or S, P)."""
    if positions is None:
        return partial[:, :, None] + contexts[:, None]
    B, T, K = positions.shape
    starts = contexts.shape[1] * torch.arange(B, device=positions.device)[:, None, None]
    return partial[:, :, None] + rows(contexts, (positions + starts).flatten()).view(B, T, K, -1)
