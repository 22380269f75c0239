"""A second implementation of attention from the papers, for one sentence without padding, in float64 NumPy and loops.

It shares only the names of the parameters with nmt.attention.
Shapes: S source positions, T target positions, Q query, M memory, A attention.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nmt.config.schema import model as schema

Array = NDArray[np.float64]
Parameters = dict[str, Array]


def attention(
    config: schema.ScoredAttention, p: Parameters, query: Array, states: Array, training: bool = False
) -> tuple[Array, Array]:
    """Attend: (T, Q), (S, M) -> context (T, M), weights (T, S). training: computes what monotonic attention does in
    training, without its noise."""
    projection = config.projection
    if isinstance(projection, schema.NoHeads):
        weights = attend(config, p, query, states, training)
        return weights @ states, weights
    inner = {name.removeprefix("inner."): value for name, value in p.items()}
    size = projection.dim // projection.heads
    heads, all_weights = [], []
    for n in range(projection.heads):  # Vaswani et al. 2017, 3.2.2
        rows = slice(n * size, (n + 1) * size)
        w_q, w_k, w_v = (p[f"{name}_proj.weight"][rows] for name in ("query", "key", "value"))
        weights = attend(config, inner, query @ w_q.T, states @ w_k.T, training)
        heads.append(weights @ (states @ w_v.T))
        all_weights.append(weights)
    return np.concatenate(heads, axis=1) @ p["output_proj.weight"].T, np.mean(all_weights, axis=0)


def attend(config: schema.ScoredAttention, p: Parameters, query: Array, states: Array, training: bool) -> Array:
    """Compute the weights of a single head: (T, Q), (S, M) -> (T, S)."""
    length = len(states)
    if isinstance(config.score, schema.LocationScore):  # later positions have no energies
        length = min(length, config.score.max_positions)
    weights, stops = np.zeros((len(query), len(states))), np.zeros((len(query), length))
    means = np.zeros(config.score.components) if isinstance(config.score, schema.GaussianMixtureScore) else np.zeros(0)
    for t, q in enumerate(query):
        before = weights[t - 1] if t else np.zeros(len(states))
        covered = weights[:t].sum(axis=0)  # See et al. 2017, eq. 10
        kept = window(config.window, p, q, t, length)
        if isinstance(config.score, schema.GaussianMixtureScore):
            means = means + np.exp(p["score.moves.weight"] @ q + p["score.moves.bias"])  # Graves 2013, eq. 51
            energies = [mixture(p, q, means, s) for s in kept]
        else:
            energies = [energy(config.score, p, q, states[s], s, before, added(config, p, covered[s])) for s in kept]
        if isinstance(config.normalizer, schema.Mocha):
            p_chunk = {name.removeprefix("chunk."): value for name, value in p.items() if name.startswith("chunk.")}
            within = [energy(config.score, p_chunk, q, states[s], s, before) for s in kept]
            stop = expected_stop if training else first_stop
            stops[t] = stop(np.array(energies) + p["normalizer.offset"], stops[t - 1], t)
            row = chunked(stops[t], np.array(within), config.normalizer.chunk)
        elif isinstance(config.normalizer, schema.Fertility):
            row = constrained(np.array(energies), np.maximum(config.normalizer.fertility - covered[kept], 0))
        else:
            row = normalized(config.normalizer, p, np.array(energies), before[:length], t, training)
        weights[t, kept] = aligned(config.alignment, row * falloff(config.window, p, q, kept, length))
    return weights


def added(config: schema.ScoredAttention, p: Parameters, covered: float) -> Array | float:
    """Compute w c_s + b, which coverage adds inside the score (See et al. 2017, eq. 11)."""
    if config.coverage.kind == "none":
        return 0.0
    return p["coverage.weight"][:, 0] * covered + p["coverage.bias"]


def energy(
    score: schema.Score, p: Parameters, q: Array, h: Array, s: int, before: Array, extra: Array | float = 0.0
) -> float:
    """Compute the energy e_ts of the state h at position s; `before` are the weights of the previous step."""
    match score:
        case schema.DotScore():  # Luong et al. 2015, eq. 7
            return float(np.sum(q * (h + extra)))
        case schema.ScaledDotScore():  # Vaswani et al. 2017, eq. 1
            return float(np.sum(q * (h + extra)) / np.sqrt(len(q)))
        case schema.GeneralScore():  # Luong et al. 2015, eq. 7
            return float(q @ (p["score.bilinear.weight"] / np.sqrt(len(q)) @ h + extra))
        case schema.CosineScore():  # Graves et al. 2014, eq. 5 and 6
            wanted = p["score.query_proj.weight"] @ q
            sharpness = np.log1p(np.exp(p["score.strength.weight"][0] @ q + p["score.offset"]))
            return float(sharpness * (wanted @ h) / np.sqrt((wanted @ wanted) * (h @ h)))
        case schema.LocationScore():  # Luong et al. 2015, eq. 8
            return float((p["score.positions.weight"] @ q)[s])
    w, u, v = p["score.query_proj.weight"], p["score.key_proj.weight"], p["score.energy.weight"][0]
    match score:
        case schema.AdditiveScore():  # Bahdanau et al. 2015, A.1.2
            return float(v @ np.tanh(w @ q + u @ h + extra))
        case schema.NormedAdditiveScore():  # Raffel et al. 2017, without the offset
            hidden = np.tanh(w @ q + u @ h + p["score.bias"] + extra)
            return float(p["score.gain"] * (v @ hidden) / np.sqrt(v @ v))
        case schema.ConcatScore():  # Luong et al. 2015, eq. 7, then further layers
            hidden = np.tanh(np.concatenate([w, u], axis=1) @ np.concatenate([q, h]) + extra)
            for layer in range(score.layers - 1):
                hidden = np.tanh(p[f"score.deeper.{layer}.weight"] @ hidden + p[f"score.deeper.{layer}.bias"])
            return float(v @ hidden)
        case schema.LocationAwareScore():  # Chorowski et al. 2015, eq. 8 and 9
            features = np.zeros(score.filters)
            for j in range(score.width):
                at = s + j - score.width // 2
                if 0 <= at < len(before):
                    features += p["score.filters.weight"][:, 0, j] * before[at]
            located = p["score.filter_proj.weight"] @ features + p["score.filter_proj.bias"]
            return float(v @ np.tanh(w @ q + u @ h + located + extra))


def mixture(p: Parameters, q: Array, means: Array, s: int) -> float:
    """Compute log phi(t, s) (Graves 2013, eq. 46 to 50); positions count from 0 here, from 1 in the paper."""
    alpha, beta = np.split(np.exp(p["score.shapes.weight"] @ q + p["score.shapes.bias"]), 2)
    return float(np.logaddexp.reduce(np.log(alpha) - beta * (means - (s + 1)) ** 2))


def centre(config: schema.Window, p: Parameters, q: Array, t: int, length: int) -> float:
    """Compute the centre p_t of the window, counted from 0 (Luong et al. 2015, 3.2)."""
    if isinstance(config, schema.LocalMonotonicWindow):
        return float(min(t, length - 1))
    hidden = np.tanh(p["window.centre_proj.weight"] @ q)
    shift = p["window.centre.weight"][0] @ hidden / np.sqrt(len(hidden))
    return float(length / (1 + np.exp(-shift)))  # eq. 9, but with the root


def window(config: schema.Window, p: Parameters, q: Array, t: int, length: int) -> list[int]:
    """List the positions inside the window."""
    if isinstance(config, schema.GlobalWindow):
        return list(range(length))
    middle = centre(config, p, q, t, length)
    return [s for s in range(length) if middle - config.reach <= s <= middle + config.reach]


def falloff(config: schema.Window, p: Parameters, q: Array, kept: list[int], length: int) -> Array:
    """Compute exp(-(s - p_t)^2 / (2 sigma^2)) of a predicted window, sigma = D / 2 (Luong et al. 2015, eq. 10)."""
    if not isinstance(config, schema.LocalPredictiveWindow):
        return np.ones(len(kept))
    middle, sigma = centre(config, p, q, 0, length), config.reach / 2
    return np.array([np.exp(-((s - middle) ** 2) / (2 * sigma**2)) for s in kept])


def normalized(
    config: schema.Normalizer, p: Parameters, energies: Array, before: Array, t: int, training: bool
) -> Array:
    """Normalise the energies of the K positions in the window: (K,) -> (K,)."""
    match config:
        case schema.Softmax():
            odds = np.exp((energies - energies.max()) / config.temperature)
            return odds / odds.sum()
        case schema.Sparsemax():  # Martins and Astudillo 2016, proposition 1
            return thresholded(energies, 1)
        case schema.Entmax15():  # Peters et al. 2019, 3, with alpha = 1.5
            return thresholded(energies / 2, 2)
        case schema.FirstOrder():  # Shankar and Sarawagi 2019, eq. 4 and 6
            return moved(config, p["normalizer.bias"], energies, before, t)
        case schema.LinearChain():
            marginals = chain(energies, p["normalizer.pairwise"].reshape(2, 2))
            return marginals / marginals.sum()
        case schema.Monotonic():
            energies = energies + p["normalizer.offset"]
            return expected_stop(energies, before, t) if training else first_stop(energies, before, t)


def thresholded(energies: Array, power: int) -> Array:
    """Compute max(e - tau, 0)^power, with tau found by bisection so that the sum is 1."""
    low, high = energies.max() - 1, energies.max()
    for _ in range(60):
        tau = (low + high) / 2
        above = (np.maximum(energies - tau, 0) ** power).sum() > 1
        low, high = (tau, high) if above else (low, tau)
    return np.maximum(energies - low, 0) ** power


def aligned(config: schema.Alignment, row: Array) -> Array:
    """Compute the weights by which the context sums the states, outside training."""
    if isinstance(config, schema.Expected):
        return row
    row = row / row.sum()
    if isinstance(config, schema.Sampled | schema.StraightThrough):  # outside training, the most probable position
        return np.eye(len(row))[np.argmax(row)]
    return row


def moved(config: schema.FirstOrder, bias: Array, energies: Array, before: Array, t: int) -> Array:
    """Average the distributions p(s | s') over the position s' of the previous step, whose weights are `before`."""
    if t == 0:
        odds = np.exp(energies - energies.max())
        return odds / odds.sum()
    weights = np.zeros(len(energies))
    for s_before, share in enumerate(before):
        odds = np.zeros(len(energies))
        for s, e in enumerate(energies):
            distance = s - s_before
            if config.monotonic and distance < 0:
                continue
            near = abs(distance) <= config.reach
            b = bias[distance + (0 if config.monotonic else config.reach)] if near else 0.0
            odds[s] = np.exp(e - energies.max() + b)
        if odds.any():
            weights += share * odds / odds.sum()
    return weights


def expected_stop(energies: Sequence[float] | Array, before: Array, t: int) -> Array:
    """Compute w_s = p_s q_s, q_s = (1 - p_{s-1}) q_{s-1} + w'_s, w' the previous weights (Raffel et al. 2017)."""
    weights = np.zeros(len(energies))
    arrived, missed = 0.0, 1.0
    for s, e in enumerate(energies):
        taken = 1 / (1 + np.exp(-e))
        started = float(s == 0) if t == 0 else before[s]
        arrived = missed * arrived + started
        weights[s], missed = taken * arrived, 1 - taken
    return weights


def first_stop(energies: Array, before: Array, t: int) -> Array:
    """Stop at the first position, from the previous stop on, with p > 1/2 (Raffel et al. 2017, algorithm 1)."""
    weights = np.zeros(len(energies))
    if t > 0 and not before.any():
        return weights  # the previous step passed the end without stopping
    for s in range(0 if t == 0 else int(before.argmax()), len(energies)):
        if 1 / (1 + np.exp(-energies[s])) > 0.5:
            weights[s] = 1.0
            break
    return weights


def chunked(stops: Array, energies: Array, chunk: int) -> Array:
    """Sum softmaxes over the chunks that end at each position, weighted by the probability to stop there. Chiu and
    Raffel 2018."""
    weights = np.zeros(len(energies))
    for end in range(len(energies)):
        first = max(0, end - chunk + 1)
        odds = np.exp(energies[first : end + 1] - energies[first : end + 1].max())
        weights[first : end + 1] += stops[end] * odds / odds.sum()
    return weights


def constrained(energies: Array, bounds: Array) -> Array:
    """Compute min(max(e - tau, 0), bound), with tau found by bisection so that the sum is 1 (Malaviya et al. 2018). The
    last position has no bound."""
    bounds = np.append(bounds[:-1], np.inf)
    low, high = energies.min() - 2, energies.max()
    for _ in range(100):
        tau = (low + high) / 2
        above = np.minimum(np.maximum(energies - tau, 0), bounds).sum() > 1
        low, high = (tau, high) if above else (low, tau)
    return np.minimum(np.maximum(energies - low, 0), bounds)


def chain(unary: Array, pairwise: Array) -> Array:
    """Compute p(z_s = 1) by the forward-backward algorithm (Kim et al. 2017, figure 2). unary: log-potentials of z_s =
    1. pairwise: log-potentials A[z_s, z_s+1]."""
    potentials = np.stack([np.zeros(len(unary)), unary], axis=1)
    forward, backward = potentials.copy(), np.zeros_like(potentials)
    for s in range(1, len(unary)):
        for z in (0, 1):
            forward[s, z] += np.logaddexp(*(forward[s - 1, i] + pairwise[i, z] for i in (0, 1)))
    for s in range(len(unary) - 2, -1, -1):
        for z in (0, 1):
            backward[s, z] = np.logaddexp(*(pairwise[z, i] + potentials[s + 1, i] + backward[s + 1, i] for i in (0, 1)))
    joint = forward + backward
    marginals: Array = np.exp(joint[:, 1] - np.logaddexp(joint[:, 0], joint[:, 1]))
    return marginals
