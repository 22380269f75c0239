"""Decoding with a latent source position: predictions that sum over it, its posterior, and an inference network.

Shapes: B batch, S source positions, T target positions or hypotheses of a sentence, E width of an embedding, H width of
a hidden state, M width of the memory, K source positions in the sum, P width of the readout before its activation,
R width of the readout, N hypotheses.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from nmt.attention.alignment import sample_positions
from nmt.attention.attention import Attention, join_steps
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
    Run,
    WordProducts,
)
from nmt.model.output import Mixture, Output, OutputLayer, Prediction
from nmt.model.recurrent import Recurrent, run_rnn
from nmt.ops.draws import Dropout, draw
from nmt.ops.products import deferring, gather_rows, linear, product, wide
from nmt.ops.trees import join, map_tensors


class LatentPosition(NamedTuple):
    """How predictions sum over the source position."""

    top_k: int | None  # the sum takes this many positions, the most probable ones; None takes all
    min_share: float = 0.0  # the sum leaves out positions whose weight is below this share of the largest weight
    observed: bool = False  # do later steps read the posterior given the token in place of the prior?
    prior_share: float = 0.0  # share of the prior that is mixed into the posterior that later steps read
    first_order: bool = False  # does the prior depend on the previous position, and on nothing else of the past?

    def strongest(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose the positions in the sum: weights (B, T, S) -> their weights (B, T, K) and positions, int64 (B, T, K).

        The weights are divided by their sum if positions may be left out. The positions are None if they are all S in
        order.
        """
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
    """Predicts p(y_t) = sum over s of a_ts p(y_t | h_s), with attention weights a_ts   (Deng et al. 2018, 2.1).

    p(y_t | h_s) comes from a readout that has the encoder state h_s of position s in place of the mean context.
    Recurrent steps and fed back readouts use the mean context, sum over s of a_ts h_s, as with soft attention. With
    `latent.observed`, the readout that is fed back is computed from the posterior given the token y_t in place of a_ts,
    and so is all that later steps read of earlier weights (Shankar and Sarawagi 2019).
    """

    sums_over_positions = True
    attention: Attention  # never several heads: the configuration refuses them with a latent alignment

    def __init__(self, *parts: Any, latent: LatentPosition, **options: Any) -> None:  # noqa: ANN401
        """parts, options: arguments of Decoder."""
        super().__init__(*parts, **options)
        self.latent = latent
        # If recurrent steps read words alone and the sum takes all positions, the probabilities of all tokens from all
        # positions can be computed at once, before any posterior is known.
        at_once = self.attend == "after" and latent.top_k is None and not latent.min_share
        # Are the positions states of a hidden Markov model? Then `_smooth` computes their posterior given all tokens.
        self.chain = latent.first_order and at_once and not self.stepped and latent.observed and not latent.prior_share
        self.stepped = self.stepped or (latent.observed and not at_once)

    def forward(
        self,
        embedded: Tensor,
        state: DecoderState,
        target: Tensor | None = None,
        output: Output | None = None,
        infer: Infer | None = None,
    ) -> Decoded:
        assert target is not None
        assert output is not None
        words, mixture, inferred = self._word_readouts(embedded, state), None, None
        if self.stepped:
            layer = output.layer()
            run = self._run_steps(embedded, words, state, lambda t, state: self.observe(state, target[:, t], layer))
            if self.latent.observed:
                mixture = Mixture(*join([step.mixture.parts for step in run.steps if step.mixture is not None], 1))
        elif self.latent.observed:
            run, mixture = self._filter(embedded, words, state, target, output.layer())
        else:
            run = self._run_fused(embedded, state)
        readouts, attended = self._readouts(run, words, state), run.attended
        assert attended is not None
        if infer is not None:
            inferred = infer(attended.weights)
            mixture, _ = self._mix(run.outputs, inferred.weights, words, state, averages_losses=True)
        if mixture is None:
            mixture, _ = self._mix(run.outputs, attended.weights, words, state)
        return Decoded(self._add_lexical(readouts, attended.weights, state), mixture, attended, inferred)

    def _filter(
        self, embedded: Tensor, words: Tensor | None, state: DecoderState, target: Tensor, output: OutputLayer
    ) -> tuple[Run, Mixture]:
        """Attend step by step, where each step reads the posterior of the previous step's position (the forward
        algorithm, if positions are states of a hidden Markov model). The decoder's states depend on words alone. So the
        probabilities of all tokens from all positions are computed before the loop over steps."""
        hidden, _ = self._run_words(embedded, state)
        memory, past = state.attended_source()[:2]
        B, T, S = *target.shape, memory.valid.shape[1]
        everywhere = memory.valid[:, None].expand(B, T, S).to(hidden.dtype)
        mixture, _ = self._mix(hidden, everywhere, words, state)
        log_probs = mixture.before_last().token_log_probs(output, target[:, 1:])
        steps, memory = [], memory.deferred()
        with deferring(self.attention):
            for t, query in enumerate(hidden.unbind(1)):
                steps.append(self.attention.step(query[:, None], memory, past))
                past = steps[-1].past
                if t < T - 1:
                    weighted = Mixture(mixture.readouts, steps[-1].weights, mixture.positions)
                    past = past.corrected(self._posterior(weighted, log_probs[:, t : t + 1])[:, 0])
        attended = join_steps(steps)
        return Run(hidden, attended), Mixture(mixture.readouts, attended.weights, mixture.positions)

    def step(self, word: WordProducts, state: DecoderState) -> tuple[Prediction, Tensor | None, DecoderState]:
        step = self._decode_step(word, state)
        assert step.attended is not None
        weights = step.attended.weights[:, 0]
        return step.mixture or self._mix(step.output, weights, word.readout, state)[0], weights, step.state

    def observe(self, state: DecoderState, tokens: Tensor, output: OutputLayer) -> DecoderState:
        """Compute the posterior of the previous step's position given the previous token. It replaces the
        weights of that step where later steps read them (Shankar and Sarawagi 2019, eq. 3 to 5)."""
        pending = state.hypothesis.pending
        if pending is None:
            return state
        source = state.attended_source()
        memory, past = source.memory, source.past
        assert past is not None
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
        """Compute p(s_t | y_1 ... y_t) of the position s_t of each step, or p(s_t | y_1 ... y_T) if the
        positions are the states of a hidden Markov model."""
        posterior, prior = super().posterior(decoded, embedded, state, target, counted, output), decoded.weights
        if not self.chain or state.attended_source().memory.steering is not None:
            return posterior
        assert posterior is not None
        assert prior is not None
        return self._smooth(posterior, prior, counted, embedded, state)

    def _smooth(
        self, posterior: Tensor, prior: Tensor, counted: Tensor, embedded: Tensor, state: DecoderState
    ) -> Tensor:
        """Run the backward pass of the forward-backward algorithm -> p(s_t | y_1 ... y_T) (B, T, S). posterior: p(s_t |
        y_1 ... y_t) (B, T, S); prior: p(s_t | y_1 ... y_{t-1}) (B, T, S); counted: bool (B, T), False at padding;
        embedded: (B, T, E) target."""
        normalizer, memory = cast(FirstOrderNormalizer, self.attention.normalizer), state.attended_source().memory
        hidden, _ = self._run_words(embedded, state)
        energies, keep = self.attention.score(hidden, memory.keys), memory.valid[:, None]
        smoothed = [posterior[:, -1]]
        for t in range(prior.shape[1] - 1, 0, -1):
            later = smoothed[-1] / prior[:, t].masked_fill(prior[:, t] == 0, 1.0)
            later = later.masked_fill(~counted[:, t, None], 1.0)  # padding does not change the posterior
            transitions = normalizer.transitions(energies[:, t : t + 1], keep)
            smoothed.append(posterior[:, t - 1] * (transitions * later[:, None]).sum(-1))
        return torch.stack(smoothed[::-1], dim=1)

    def _posterior(self, mixture: Mixture, log_probs: Tensor) -> Tensor:
        """Compute the weights that later steps read, from log-probabilities of the token: (B, T, K) -> (B, T, K)."""
        posterior = mixture.posterior(log_probs)
        return torch.lerp(posterior, mixture.weights.to(posterior.dtype), self.latent.prior_share)

    def _decode_step(self, word: WordProducts, state: DecoderState) -> DecoderStep:
        step = super()._decode_step(word, state)
        if not self.latent.observed:
            return step
        assert step.attended is not None
        mixture, partial = self._mix(step.output, step.attended.weights[:, 0], word.readout, state)
        pending = Pending(*map_tensors(lambda part: part.flatten(0, 1), mixture.parts), partial)
        state = step.state._replace(hypothesis=step.state.hypothesis._replace(pending=pending))
        return step._replace(mixture=mixture, state=state)

    def _mix(
        self, output: Tensor, weights: Tensor, word: Tensor | None, state: DecoderState, averages_losses: bool = False
    ) -> tuple[Mixture, Tensor]:
        """Mix the readouts of source positions: outputs (B, T, H), weights (B, T, S), what words add to the readouts
        (B, T, P) -> Mixture, and the readouts before their activation, without a context (B * T, P). For one step of a
        search, pass rows (N, ...) grouped by sentence. averages_losses: see `Mixture`."""
        source, parameters = state.attended_source(), state.parameters
        assert source.contexts is not None
        partial = linear(output, parameters.output, parameters.output_bias)
        partial = partial if word is None else partial + word
        partial, weights = (part.reshape(len(source.contexts), -1, part.shape[-1]) for part in (partial, weights))
        strongest, positions = self.latent.strongest(weights)
        readouts: Tensor = self.dropout(self.readout.activation(_of_positions(partial, source.contexts, positions)))
        if parameters.lexical is not None:
            assert source.words is not None
            words = parameters.lexical.of_attended(source.words)  # (B, S, R), where R = E
            added = _of_positions(words.new_zeros(*partial.shape[:2], 1), words, positions)
            readouts = readouts + self.dropout(added.expand_as(readouts))
        return Mixture(readouts, strongest, positions, averages_losses), partial.flatten(0, 1)


class InferenceNetwork(nn.Module):
    """An inference network: q(s | x, y) = softmax over s of g_t . W h_s   (Deng et al. 2018, section 4).

    g_t are the states of a bidirectional network over the whole target, h_s the encoder states; in the paper the
    network has a separate encoder. The softmax leaves out positions where the prior is 0, so that the divergence
    from the prior is finite.
    """

    def __init__(self, rnn: Recurrent, memory_dim: int, dropout: Dropout, sample: bool) -> None:
        """sample: draw one position from q, in place of all positions with their weights."""
        super().__init__()
        self.rnn, self.dropout, self.sample = rnn, dropout, sample
        self.score = GeneralScore(2 * rnn.hidden_size, memory_dim)

    def forward(self, embedded: Tensor, lengths: Tensor, states: Tensor, prior: Tensor) -> Inferred:
        """Infer the positions from the embedded target y_1 ... y_T (B, T, E), its lengths int64 (B,), encoder states
        (B, S, M) and the prior (B, T, S)."""
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
    """Add the context term of source positions to the rest of the sum inside the readout's activation. partial (B, T,
    P), contexts (B, S, P), positions int64 (B, T, K) -> (B, T, K, P). Without `positions`, these are all S positions in
    order, so K = S."""
    if positions is None:
        return partial[:, :, None] + contexts[:, None]
    B, T, K = positions.shape
    first = contexts.shape[1] * torch.arange(B, device=positions.device)[:, None, None]  # row of each first position
    return partial[:, :, None] + gather_rows(contexts, (positions + first).flatten()).view(B, T, K, -1)
