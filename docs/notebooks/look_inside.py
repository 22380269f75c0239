# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %%
# On a hosted notebook, run this in a new cell first:  %pip install "nmt-attention[notebooks] @ git+https://example.org/nmt"

# %% [markdown]
# # Look inside
#
# Three questions about one small model, trained below in about a minute:
#
# 1. Do the attention weights (*explicit* attention) agree with the Jacobian (*implicit* attention)?
# 2. What does the model write if we tell it where to look?
# 3. If it chooses one position instead of mixing all, how does it learn? REINFORCE against the exact sum, on three positions.

# %%
import gzip
import logging
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.typing import NDArray

import nmt
from nmt.data.corpus import DEMO
from nmt.explain.explanation import explain

Array = NDArray[np.float64]
logging.disable(logging.INFO)  # leave this line out to follow the training
plt.rcParams["figure.dpi"] = 70

# %% [markdown]
# ## A model
#
# Sentences of at most nine words of the demo corpus, and 600 updates: enough for many of them, but this is a toy.

# %%
folder = Path("corpus")
folder.mkdir(exist_ok=True)
with gzip.open(DEMO, "rt", encoding="utf-8") as file:
    rows = [line.rstrip("\n").split("\t") for line in file][1:]
for split, pairs in {"train": rows[600:14600], "validation": rows[300:600], "test": rows[:300]}.items():
    short = [(english, french) for english, french, _ in pairs if len(english.split()) <= 9]
    for language, lines in zip(("en", "fr"), zip(*short, strict=True), strict=True):
        (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")

data = {"source_lang": "en", "target_lang": "fr"}
data |= {split: str(folder / split) for split in ("train", "validation", "test")}
small = ["tokenizer=word", "embedding.dim=64", "encoder.hidden=64", "decoder.hidden=128", "optimizer.lr=0.005"]
small += ["training.batch_tokens=512", "training.max_steps=600", "training.max_epochs=100", "schedule.warmup_steps=50"]
small += ["validation.unit=steps", "validation.every=600", "validation.samples=1"]
run = nmt.train("attention=luong_concat", *small, data=data)
translator = run.translator()
print(f"{run.scores['test']['bleu']:.1f} BLEU on the test set")

# %% [markdown]
# ## 1. Weights and Jacobian
#
# The weight $\alpha_{ts}$ says how much of the *encoder's state* $s$ enters step $t$. The Jacobian asks about the *word*: how much does the
# log-probability of the target word $y_t$ change with the embedding $x_s$?
#
# $$j_{ts} = \left\lVert \frac{\partial \log p(y_t \mid y_{<t}, x)}{\partial x_s} \right\rVert$$
#
# `explain` computes both by forced decoding, the Jacobian as shares, so that each row sums to 1. A third view needs no gradient: leave the
# word out, and see by how much $\log p(y_t)$ falls.

# %%
source = "the doctor sees the red houses ."
target = "le médecin voit les maisons rouges ."
print("the model writes:", translator.translate([source])[0].text)

explanation = explain(translator, source, target)
words = source.split()
without = [" ".join(words[:s] + words[s + 1 :]) for s in range(len(words))]
scored = translator.score(without, [target] * len(words))
falls = np.array(explanation.token_log_probs)[:, None] - np.array([one.token_log_probs for one in scored]).T

views = {
    "attention weights": explanation.alignment,
    "Jacobian, shares": explanation.saliency,
    "fall of log p without the word": falls.clip(0, 5) / 5,
}
figure, panels = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
for axes, (title, matrix) in zip(panels, views.items(), strict=True):
    axes.imshow(matrix, cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(matrix.shape[1]), explanation.source_tokens[: matrix.shape[1]], rotation=60)
    axes.set_yticks(range(len(explanation.tokens)), explanation.tokens)
    axes.set_title(title, fontsize=10)
plt.show()

# %% [markdown]
# (In the right panel, yellow is a fall of 5 nats or more.) How well do they agree? For each target word: the word with the largest
# weight, the one with the largest gradient, and Kendall's $\tau$ between the two orders of all words (1: the same order, 0:
# unrelated).


# %%
def kendall(first: Array, second: Array) -> float:
    """Kendall's tau of two rows (S,) without ties."""
    upper = np.triu_indices(len(first), k=1)
    agree = np.sign(first[:, None] - first)[upper] * np.sign(second[:, None] - second)[upper]
    return float(agree.mean())


rows = zip(explanation.tokens, explanation.alignment, explanation.saliency, strict=True)
for token, weights, shares in rows:
    tops = [explanation.source_tokens[row.argmax()] for row in (weights, shares)]
    print(f"{token:10} attention: {tops[0]:8} gradient: {tops[1]:8} tau {kendall(weights, shares):+.2f}")

# %% [markdown]
# Nouns, verbs and adjectives mostly agree. Look at the articles: the attention of "le" and of "les" is on "the", the same English word, which cannot
# say which article is right. The noun can, and the two views on the right see it: "le" depends on "doctor" too, "les" on "houses".
#
# The views need not agree. The encoder is recurrent, so that state $s$ knows its neighbours, and the decoder's own state carries the source
# past the attention. A weight on position $s$ is no weight on word $s$ alone. [What attention explains](../faithfulness.md) measures this on
# a whole test set.
#
# ## 2. Steering
#
# `attend={step: position}` puts the whole weight of one step on one position. If attention decides what is said, the word of that step
# changes. Steps and positions count from 0. We steer the step of "les".

# %%
step = explanation.tokens.index("▁les")
for position, word in enumerate(explanation.source_tokens):
    steered = translator.translate([source], attend={step: position})[0]
    print(f"step {step} looks at {position} {word:8} {steered.text}")

# %% [markdown]
# Compare positions 0 and 3. Both are "the", but the state at 3 has read "red houses" and says "les", while the state at 0 has read "doctor" and
# says "le" in our run. So attention does decide, but it points at *states*, and a state is about a word in its sentence.
#
# Later words may change as well: the steered context goes on in the decoder's state, and the decoder continues from the word that it wrote. To
# separate the two, force the words and steer only the weights. Below, each column is one forced position, and each row the log-probability
# of the target word at that step, relative to the free model.

# %%
T, S = explanation.alignment.shape
forced = np.empty((T, S))
for s in range(S):
    for t in range(T):
        one = translator.score([source], [target], attend={t: s})[0]
        forced[t, s] = one.token_log_probs[t] - explanation.token_log_probs[t]

figure, axes = plt.subplots(figsize=(5, 4.2), layout="constrained")
picture = axes.imshow(forced, cmap="RdBu", vmin=-6, vmax=6)
axes.set_xticks(range(S), explanation.source_tokens, rotation=60)
axes.set_yticks(range(T), explanation.tokens)
axes.set_title("log p with all weight on one position, minus log p", fontsize=10)
figure.colorbar(picture, label="nats")
plt.show()

# %% [markdown]
# White means that the position does as well as the free weights, red that it does worse. Where a row has several white cells, the
# model could have found the word elsewhere too: other encoder states, or the decoder's hidden state, know it already.
#
# ## 3. REINFORCE against the exact sum
#
# *Hard* attention chooses one position $s \sim \alpha$ and predicts from it alone. For one target word and three positions everything
# can be written down. Let $R_s = \log p(y \mid h_s)$. Training maximises the expected log-probability
#
# $$J = \sum_s \alpha_s R_s, \qquad \alpha = \mathrm{softmax}(e), \qquad \frac{\partial J}{\partial e_j} = \alpha_j (R_j - J)$$
#
# The sum needs a prediction from *every* position. REINFORCE (Williams 1992) needs only the sampled one:
#
# $$g = (R_s - b) \nabla_e \log \alpha_s = (R_s - b) (\mathrm{onehot}(s) - \alpha), \qquad
# \mathbb{E}[g] = \nabla_e J \text{ for every constant } b$$

# %%
energies = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
rewards = torch.tensor([0.70, 0.20, 0.05], dtype=torch.float64).log()  # R_s
expected = (energies.softmax(0) * rewards).sum()
(exact,) = torch.autograd.grad(expected, energies)

alpha, R, J, exact = energies.softmax(0).detach().numpy(), rewards.numpy(), expected.item(), exact.numpy()
assert np.allclose(exact, alpha * (R - J))


def estimates(baseline: float) -> Array:
    """The estimate g for each sample s = 0, 1, 2: (3, 3), a row for each s."""
    return (R - baseline)[:, None] * (np.eye(3) - alpha)


def variance(baseline: float) -> float:
    """The variance of g, summed over its three entries; exact, as there are three outcomes."""
    squares = ((estimates(baseline) - exact) ** 2).sum(axis=1)
    return float(alpha @ squares)


lengths = ((np.eye(3) - alpha) ** 2).sum(axis=1)  # |grad log alpha_s|^2
best = float((alpha * lengths * R).sum() / (alpha * lengths).sum())  # where the derivative of the variance is 0
baselines = {"no baseline": 0.0, "expected reward J": J, "best constant": best}
print("exact gradient", exact.round(3))
for name, baseline in baselines.items():
    mean = alpha @ estimates(baseline)
    assert np.allclose(mean, exact)  # unbiased, whatever the baseline
    print(f"{name:18} b = {baseline:+.3f}  mean {mean.round(3)}  variance {variance(baseline):.3f}")

# %% [markdown]
# The mean is the exact gradient for every baseline, but the variance is not. Log-probabilities are all negative: without a baseline every
# sample says "less of this one", and only the average over many samples sorts that out. With $b = J$, only what is better or worse than
# expected counts.

# %%
random = np.random.default_rng(1)
samples = random.choice(3, size=3000, p=alpha)
counts = np.arange(1, len(samples) + 1)
grid = np.linspace(-3, 1, 200)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for number, (name, baseline) in enumerate(list(baselines.items())[:2]):
    of_samples = estimates(baseline)[samples, 0]
    spread = np.sqrt(alpha @ (estimates(baseline)[:, 0] - exact[0]) ** 2)
    left.semilogx(counts, of_samples.cumsum() / counts, color=f"C{number}", label=name)
    left.fill_between(
        counts, exact[0] - spread / counts**0.5, exact[0] + spread / counts**0.5, color=f"C{number}", alpha=0.15
    )
left.axhline(exact[0], color="black", linewidth=0.8, label="exact sum")
left.set(xlabel="samples", ylabel="mean of g for position 0", ylim=(-1, 1.5))
left.legend()
right.plot(grid, [variance(baseline) for baseline in grid], color="grey")
for number, (name, baseline) in enumerate(baselines.items()):
    right.plot(baseline, variance(baseline), "o", color=f"C{number}", label=name)
right.set(xlabel="baseline b", ylabel="variance of g", ylim=(0, None))
right.legend()
plt.show()

# %% [markdown]
# The shaded bands are one standard deviation of the mean of $n$ samples: they shrink with $\sqrt n$, and a smaller variance is worth
# as much as more samples. Does it matter for learning? One sample per update, 200 repetitions; the baseline is a moving mean of past rewards,
# because $J$ is unknown in training.


# %%
def learn(estimator: str, updates: int = 100, repetitions: int = 200, rate: float = 0.2) -> Array:
    """Learn the energies from zero. Returns the probability of the best position, (updates, repetitions)."""
    e, baseline = np.zeros((repetitions, 3)), np.full(repetitions, R.mean())
    curve = np.empty((updates, repetitions))
    for update in range(updates):
        a = np.exp(e) / np.exp(e).sum(axis=1, keepdims=True)
        curve[update] = a[:, 0]
        if estimator == "exact sum":
            e += rate * a * (R - a @ R[:, None])
            continue
        s = (a.cumsum(axis=1) < random.random((repetitions, 1))).sum(axis=1).clip(max=2)
        advantage = R[s] - (baseline if estimator == "moving mean" else 0.0)
        e += rate * advantage[:, None] * (np.eye(3)[s] - a)
        baseline += 0.1 * (R[s] - baseline)
    return curve


plt.figure(figsize=(6, 3.2))
for number, estimator in enumerate(("exact sum", "moving mean", "no baseline")):
    low, middle, high = np.quantile(learn(estimator), (0.1, 0.5, 0.9), axis=1)
    plt.plot(middle, color=f"C{number}", label=estimator)
    plt.fill_between(np.arange(len(low)), low, high, color=f"C{number}", alpha=0.15)
plt.xlabel("updates")
plt.ylabel("weight of the best position")
plt.title("median, and the middle 80 % of 200 repetitions", fontsize=10)
plt.legend()
plt.show()

# %% [markdown]
# The three end in the same place, for the estimates are unbiased. What the baseline buys is the narrower band: a single training can be
# relied on. In a real model such noise enters at every target word, and the encoder has to learn from it too.
#
# ### What the sum could be instead
#
# If every position can be afforded, $J$ is not the best thing to maximise. The probability of the word is the sum over the positions, and
# by Jensen's inequality $J$ is a lower bound of its logarithm:
#
# $$J = \sum_s \alpha_s \log p(y \mid h_s) \le \log \sum_s \alpha_s p(y \mid h_s)$$
#
# The gradient of the right side is *posterior minus prior*: it moves the weights to where the word can be explained.

# %%
marginal = torch.logsumexp(energies.log_softmax(0) + rewards, 0)
(gradient,) = torch.autograd.grad(marginal, energies)
posterior = alpha * np.exp(R - marginal.item())
assert marginal.item() >= J
assert np.allclose(gradient, posterior - alpha)
print(f"J = {J:.3f} <= log p = {marginal.item():.3f}")
print("posterior minus prior", (posterior - alpha).round(3))
print("gradient of J        ", exact.round(3))

# %% [markdown]
# The presets are [`hard`](../attention/hard.md) for REINFORCE, [`gumbel`](../attention/gumbel.md) for a relaxed choice, and
# [`marginal`](../attention/marginal.md) for the sum.
#
# ## Exercises
#
# 1. Put half of the weight of step 3 on each "the", with `attend={3: [0.5, 0, 0, 0.5, 0, 0, 0, 0]}`. Which article wins, and why?
# 2. Add 10 to all rewards. Which curves of the learning plot change?
# 3. Is `expected reward J` always close to the best constant? Try energies of (5, 0, 0).
#
# Answers: (1) in our run "les", but the mean of two states is a state that the model has hardly ever seen, so with another seed it may
# be neither. (2) only the one without a baseline. (3) no: a position with a large weight has a short gradient, and the best constant leans towards the rewards of the others.
