"""A decoder whose predictions sum over a latent source position.

Shapes: B batch, S source positions, T target positions or hypotheses of a sentence, E embedding, H hidden, K positions
in the sum, P what the readout's activation gets, R readout, N hypotheses.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.attention.memory import join_steps
from nmt.attention.normalizers import FirstOrderNormalizer
from nmt.model.decoder import Decoded, Decoder, DecoderStep
from nmt.model.latent.mixture import Inferred, LatentPosition, Mixture, Pending, join_mixtures
from nmt.model.readout import of_positions
from nmt.model.state import DecoderState
from nmt.ops.linear import product
from nmt.ops.shared import loop

Infer = Callable[[Tensor], Inferred]
"""The prior (B, T, S) -> what an inference network says of the positions."""
TokenLogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Readouts (N, K, R), their weights (N, K), int64 tokens (N,) -> log-probabilities (N, K), where there is weight."""


class LatentDecoder(Decoder):
    """p(y_t) = sum_s a_ts p(y_t | h_s), the readout of each position computed from its own encoder state (Deng et al.
    2018, 3). Recurrent steps and what is fed back read the mean context, as in soft attention, or with
    `latent.observed` its posterior mean (Shankar and Sarawagi 2019)."""

    def __init__(self, *parts: Any, latent: LatentPosition, **options: Any) -> None:  # noqa: ANN401
        """parts, options: those of Decoder."""
        super().__init__(*parts, **options)
        assert self.attention is not None
        self.latent = latent
        # Where steps read words alone and every position has a readout, all tokens' probabilities are known at once.
        at_once = self.attend == "after" and latent.top_k is None and not latent.min_share
        self.chain = at_once and not self.stepped and self._depends_on_previous_position()
        self.stepped = self.stepped or (latent.observed and not at_once)

    def _depends_on_previous_position(self) -> bool:
        """Where steps read words alone: does a position depend on the previous position, and on nothing else?"""
        return (
            self.latent.observed
            and not self.latent.prior_share
            and isinstance(self.attention, Attention)
            and isinstance(self.attention.normalizer, FirstOrderNormalizer)
            and not self.attention.score.reads_past
            and self.attention.coverage is None
        )

    def forward(  # type: ignore[override]
        self,
        embedded: Tensor,
        state: DecoderState,
        target: Tensor,
        log_probs: TokenLogProbs,
        infer: Infer | None = None,
    ) -> Decoded:
        """Teacher forcing: (B, T, E) embeddings of the target, int64 (B, T) = <s> y_1 ... y_{T-1} -> Decoded with all T
        steps.

        infer: gives the weights of the positions in training.
        """
        mixture = inferred = None
        if self.stepped:
            steps = self._run_steps(embedded, state, lambda t, state: self.observe(state, target[:, t], log_probs))
            decoded, outputs = self._joined(steps, embedded, state), self._outputs(steps)
            if self.latent.observed:
                mixture = join_mixtures([step.mixture for step in steps if step.mixture is not None])
        elif self.latent.observed:
            decoded, outputs = self._filtered(embedded, state, target, log_probs)
            mixture = decoded.mixture
        else:
            decoded, outputs = self._fused(embedded, state)
        assert decoded.weights is not None
        if infer is not None:
            inferred = infer(decoded.weights)
            mixture = self._mixture(outputs, inferred.weights, embedded, state)[0]._replace(averages_losses=True)
        if mixture is None:
            mixture, _ = self._mixture(outputs, decoded.weights, embedded, state)
        readouts = self._add_lexical(decoded.readouts, decoded.weights, state)
        return decoded._replace(readouts=readouts, mixture=mixture, inferred=inferred)

    def _filtered(
        self, embedded: Tensor, state: DecoderState, target: Tensor, log_probs: TokenLogProbs
    ) -> tuple[Decoded, Tensor]:
        """The forward algorithm: as the states depend on words alone, one call gives the probabilities of all tokens
        from all positions, and the loop over steps only attends -> Decoded, outputs (B, T, H)."""
        hidden, _ = self._run_words(embedded, state)
        memory, past = state.attention()
        B, T, S = *target.shape, memory.valid.shape[1]
        everywhere = memory.valid[:, None].expand(B, T, S).to(hidden.dtype)
        mixture, _ = self._mixture(hidden, everywhere, embedded, state)
        rows, present = mixture.readouts[:, :-1].flatten(0, 1), everywhere[:, :-1].flatten(0, 1)
        known = log_probs(rows, present, target[:, 1:].flatten()).view(B, T - 1, S)
        assert self.attention is not None
        steps = []
        with loop():
            for t, query in enumerate(hidden.unbind(1)):
                steps.append(self.attention.step(query[:, None], memory, past))
                past = steps[-1].past
                if t < T - 1:
                    weights = steps[-1].weights
                    posterior = self._posterior(mixture._replace(weights=weights), known[:, t : t + 1])
                    past = past.corrected(posterior[:, 0])
        attended = join_steps(steps)
        decoded = self._decoded(hidden, attended, embedded, state)
        return decoded._replace(mixture=mixture._replace(weights=attended.weights)), hidden

    def step(self, word: Tensor, state: DecoderState) -> tuple[Mixture, Tensor, DecoderState]:
        """As Decoder.step, with a mixture grouped by sentence for the readout."""
        step = self._step(state.weights.word_gates(word, state.fixed), word, state)
        assert step.attended is not None
        weights = step.attended.weights[:, 0]
        mixture = step.mixture or self._mixture(self._output(step.state.cell), weights, word, state)[0]
        return mixture, weights, step.state

    def observe(self, state: DecoderState, tokens: Tensor, log_probs: TokenLogProbs) -> DecoderState:
        """The state in which the previous token is known: what later steps read of the previous attention is its
        posterior (Shankar and Sarawagi 2019, eq. 3 to 5). tokens: int64 (N,)."""
        if state.pending is None:
            return state
        memory, past = state.attention()
        mixture = state.pending.mixture(memory.sentences)
        known = log_probs(state.pending.readouts, state.pending.weights, tokens).view_as(mixture.weights)
        posterior = mixture.spread(self._posterior(mixture, known), memory.valid.shape[1])  # (B, T, S)
        assert self.attention is not None
        assert not isinstance(self.attention, MultiHeadAttention)  # refused with a latent position
        feed = state.feed
        if self.input_feeding:
            assert state.contexts is not None
            context = product(self.attention.drop(posterior, memory), state.contexts).flatten(0, 1)
            feed = self._drop(self.readout.activation(state.pending.partial + context), state)
        past = past.corrected(posterior[:, 0]) if self.attention.reads_past else past
        return state._replace(past=past, feed=feed, pending=None)

    def smoothed(
        self, posterior: Tensor, prior: Tensor, counted: Tensor, embedded: Tensor, state: DecoderState
    ) -> Tensor:
        """p(s_t | y_1 ... y_t), p(s_t | y_1 ... y_{t-1}) (B, T, S), bool (B, T) False on padding, (B, T, E) ->
        p(s_t | y_1 ... y_T) (B, T, S), by the backward pass of the forward-backward algorithm.

        Returns the posterior unchanged unless the positions form a Markov chain given the words.
        """
        assert isinstance(self.attention, Attention)
        memory, _ = state.attention()
        if not self.chain or memory.steering is not None:
            return posterior
        normalizer, keep = self.attention.normalizer, memory.valid[:, None]
        assert isinstance(normalizer, FirstOrderNormalizer)
        hidden, _ = self._run_words(embedded, state)
        energies = self.attention.score(hidden, memory.keys)
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

    def _step(self, gates: Tensor, word: Tensor, state: DecoderState) -> DecoderStep:
        step = super()._step(gates, word, state)
        if not self.latent.observed:
            return step
        assert step.attended is not None
        output = self._output(step.state.cell)
        mixture, partial = self._mixture(output, step.attended.weights[:, 0], word, state)
        return step._replace(mixture=mixture, state=step.state._replace(pending=Pending.of(mixture, partial)))

    def _mixture(self, output: Tensor, weights: Tensor, word: Tensor, state: DecoderState) -> tuple[Mixture, Tensor]:
        """(B, T, H), (B, T, S), (B, T, E), or all without T and with rows grouped by sentence -> Mixture, and what the
        readout's activation gets without a context, (B T, P)."""
        assert state.contexts is not None
        B = state.contexts.shape[0]
        output, weights, word = (part.reshape(B, -1, part.shape[-1]) for part in (output, weights, word))
        partial = state.weights.read_out_partly(output, word)  # (B, T, P)
        chosen, positions = self.latent.strongest(weights)
        readouts = self._drop_each(self.readout.activation(of_positions(partial, state.contexts, positions)), state)
        if self.lexical is not None:
            assert state.words is not None
            words = self.lexical.of_attended(state.words)  # (B, S, R)
            added = of_positions(words.new_zeros(*partial.shape[:2], 1), words, positions)
            readouts = readouts + self._drop_each(added.expand_as(readouts), state)
        return Mixture(readouts, chosen, positions), partial.flatten(0, 1)

    def _drop_each(self, readouts: Tensor, state: DecoderState) -> Tensor:
        """(B, T, K, R) -> (B, T, K, R)."""
        return self._drop(readouts.flatten(1, 2), state).view_as(readouts)
