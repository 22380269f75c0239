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
# # Attention from scratch
#
# General attention in NumPy, part by part, beside the library. Each part ends in an assertion that both compute the same numbers.
# A second or two on a CPU; nothing is trained.
#
# Shapes: $T$ target positions, $S$ source positions, $d$ entries of a query or a key, $m$ entries of a value.

# %%
from io import BytesIO

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Image, display
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import AdditiveScore, DotScore, GeneralScore, ScaledDotScore
from nmt.attention.windows import GlobalWindow, LocalMonotonicWindow

Array = NDArray[np.float64]
plt.rcParams["figure.dpi"] = 70
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)  # so that both sides agree to 12 digits

# %% [markdown]
# ## The idea in ten lines
#
# A query is compared with every key. The softmax turns the scores, or *energies*, into weights that sum to one, and the context
# vector is the mean of the values under these weights:
#
# $$e_{ts} = \frac{q_t^\top k_s}{\sqrt{d}}, \qquad \alpha_{ts} = \frac{\exp(e_{ts}/\tau)}{\sum_j \exp(e_{tj}/\tau)}, \qquad
# c_t = \sum_s \alpha_{ts} v_s$$
#
# The *temperature* $\tau$ is 1 in most papers. `keep` says which positions a query may attend to; all others get the weight 0.


# %%
def softmax(energies: Array, temperature: float = 1.0, keep: Array | None = None) -> Array:
    """(T, S) -> weights (T, S). Each row needs one position to keep."""
    energies = energies / temperature
    if keep is not None:
        energies = np.where(keep, energies, -np.inf)
    weights = np.exp(energies - energies.max(axis=-1, keepdims=True))  # the largest is exp(0): no overflow
    return weights / weights.sum(axis=-1, keepdims=True)


def attend(queries: Array, keys: Array, values: Array, **options: float | Array) -> tuple[Array, Array]:
    """(T, d), (S, d), (S, m) -> contexts (T, m) and weights (T, S)."""
    weights = softmax(queries @ keys.T / np.sqrt(keys.shape[-1]), **options)
    return weights @ values, weights


# %% [markdown]
# ## A sentence
#
# No model yet: each English word gets a random key, and each French word asks with the key of the word that it translates, plus noise.
# In a trained model, the encoder and the decoder have learned to make such keys and queries.

# %%
source = ["the", "small", "dogs", "see", "the", "red", "house", "."]
target = ["les", "petits", "chiens", "voient", "la", "maison", "rouge", "."]
translates = [0, 1, 2, 3, 4, 6, 5, 7]

random = np.random.default_rng(3)
keys = random.normal(size=(len(source), 16))
queries = keys[translates] + 0.7 * random.normal(size=(len(target), 16))
contexts, weights = attend(queries, keys, values=keys)


def draw(axes: plt.Axes, weights: Array, title: str) -> None:
    """Draw weights (T, S) of the sentence: a row for each French word."""
    axes.imshow(weights, cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(len(source)), source, rotation=60)
    axes.set_yticks(range(len(target)), target)
    axes.set_title(title, fontsize=10)


figure, axes = plt.subplots(figsize=(4, 4))
draw(axes, weights, "attention weights")
plt.show()

# %% [markdown]
# Row "maison" is brightest at "house", and "rouge" at "red": the weights cross, because the words do.
#
# ## Temperature and window
#
# A low temperature sharpens the weights towards one position (*hard* attention), a high one blurs them towards the mean of all values.
# *Local* attention lets step $t$ see only $[t - D, t + D]$, where $D$ is the *reach* (Luong et al. 2015, local-m). What lies outside
# cannot be reached, however well it fits.


# %%
def window(T: int, S: int, reach: int) -> Array:
    """Which positions each step sees, bool (T, S). Beyond the end of the source, the window stays at the last position."""
    centres = np.minimum(np.arange(T), S - 1)
    return np.abs(np.arange(S) - centres[:, None]) <= reach


def entropy(weights: Array) -> float:
    """The mean entropy of the rows, in nats: 0 for one position, log S for equal weights."""
    return float((weights * np.log(1 / np.maximum(weights, 1e-300))).sum(axis=-1).mean())


def weights_with(temperature: float, reach: int) -> Array:
    """The weights (T, S) of the sentence."""
    keep = window(len(target), len(source), reach)
    return attend(queries, keys, keys, temperature=temperature, keep=keep)[1]


figure, grid = plt.subplots(2, 3, figsize=(9, 6.4), sharex=True, sharey=True, layout="constrained")
for row, reach in zip(grid, (7, 0), strict=True):
    for axes, temperature in zip(row, (0.2, 1.0, 5.0), strict=True):
        weights = weights_with(temperature, reach)
        draw(axes, weights, f"temperature {temperature}, reach {reach}\nentropy {entropy(weights):.2f} nats")
plt.show()

# %% [markdown]
# In the second row the reach is 0, so that each word sees one position and the temperature has nothing to divide up: "maison" must look
# at "red". With a reach of 1 the two words cross again. Try it with the sliders; without ipywidgets the cell draws one picture.


# %%
def picture(temperature: float = 1.0, reach: int = 1) -> bytes:
    """Draw the weights of the sentence as PNG."""
    weights = weights_with(temperature, reach)
    figure = Figure(figsize=(4.4, 4.4), dpi=70, layout="constrained")
    title = f"temperature {temperature:.1f}, reach {reach}: entropy {entropy(weights):.2f} nats"
    draw(figure.add_subplot(), weights, title)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


try:
    import ipywidgets
except ImportError:
    display(Image(picture()))
else:
    temperature = ipywidgets.FloatSlider(value=1.0, min=0.1, max=10.0, step=0.1, description="temperature")
    reach = ipywidgets.IntSlider(value=1, min=0, max=len(source) - 1, description="reach")
    image = ipywidgets.Image(value=picture())

    def redraw(change: object) -> None:
        """Draw again after a slider has moved."""
        image.value = picture(temperature.value, reach.value)

    temperature.observe(redraw, names="value")
    reach.observe(redraw, names="value")
    display(ipywidgets.VBox([temperature, reach, image]))

# %% [markdown]
# ## Beside the library: scores
#
# Three scores, in NumPy and as the library's parts. `general` and `additive` have parameters, which we copy. For the general score, the
# library learns $\sqrt d \, W$ in place of $W$, which suits Adam better:
#
# $$\text{scaled dot: } \frac{q^\top k}{\sqrt d}, \qquad \text{general: } q^\top W k, \qquad \text{additive: } v^\top \tanh(W q + U k)$$

# %%
d, A = 16, 5


def additive(queries: Array, keys: Array, W: Array, U: Array, v: Array) -> Array:
    """(T, d), (S, d), (A, d), (A, d), (A,) -> energies (T, S)."""
    return np.tanh((queries @ W.T)[:, None] + (keys @ U.T)[None, :]) @ v


def parameters(module: torch.nn.Module) -> list[Array]:
    """The parameters of a part, as NumPy's arrays."""
    return [parameter.detach().numpy() for parameter in module.parameters()]


def batch(array: Array) -> torch.Tensor:
    """A batch of one: (L, d) -> (1, L, d)."""
    return torch.tensor(array)[None]


general_score, additive_score = GeneralScore(d, d), AdditiveScore(d, d, A)
(W_general,) = parameters(general_score)
W, U, v = parameters(additive_score)
energies = {
    "dot": (DotScore(), queries @ keys.T),
    "scaled dot": (ScaledDotScore(), queries @ keys.T / np.sqrt(d)),
    "general": (general_score, queries @ W_general @ keys.T / np.sqrt(d)),
    "additive": (additive_score, additive(queries, keys, W, U, v.ravel())),
}
for name, (score, ours) in energies.items():
    with torch.no_grad():
        theirs = score(batch(queries), score.keys(batch(keys)))[0].numpy()
    assert np.allclose(ours, theirs), name
    print(
        f"{name:10}  energies from {ours.min():6.2f} to {ours.max():6.2f}, largest difference {abs(ours - theirs).max():.0e}"
    )

# %% [markdown]
# Unscaled dot products of 16 entries spread over dozens of nats, and the softmax of such energies is nearly one-hot. That is why Vaswani et
# al. (2017) divide by $\sqrt{d}$. The additive score cannot grow beyond $\sum_a |v_a|$.
#
# ## Beside the library: temperature and window
#
# An attention of the library is a score, a window and a normalizer. `valid` says which positions are words and not padding.


# %%
def library(temperature: float, reach: int) -> Array:
    """The library's weights (T, S) of the sentence."""
    parts = Attention(ScaledDotScore(), LocalMonotonicWindow(reach), SoftmaxNormalizer(temperature))
    valid = torch.ones(1, len(source), dtype=torch.bool)
    with torch.no_grad():
        memory = parts.remember(batch(keys), valid)
        return parts.sequence(batch(queries), memory).weights[0].numpy()


for temperature in (0.2, 1.0, 5.0):
    for reach in range(len(source)):
        assert np.allclose(library(temperature, reach), weights_with(temperature, reach))
print("equal for 3 temperatures and", len(source), "reaches")

# %% [markdown]
# ## General attention: queries, keys, values and heads
#
# So far one vector was compared and averaged. General attention learns separate projections, and several *heads* attend side by side with
# $1/N$ of the entries each:
#
# $$c_t = W_o [\mathrm{head}_1; \ldots; \mathrm{head}_N], \qquad
# \mathrm{head}_n = \mathrm{attend}(W_q^n d_t, W_k^n h, W_v^n h)$$

# %%
heads, dim = 2, 8
parts = Attention(ScaledDotScore(), GlobalWindow(), SoftmaxNormalizer())
general = MultiHeadAttention(parts, query_dim=6, memory_dim=10, dim=dim, heads=heads)
decoder_states, encoder_states = random.normal(size=(3, 6)), random.normal(size=(5, 10))  # T = 3, S = 5
valid = torch.tensor([[True, True, True, True, False]])  # the last position is padding
with torch.no_grad():
    memory = general.remember(batch(encoder_states), valid)
    theirs = general.sequence(batch(decoder_states), memory)

W_q, W_k, W_v, W_o = parameters(general)
projected = decoder_states @ W_q.T, encoder_states @ W_k.T, encoder_states @ W_v.T
by_head = zip(*(np.split(array, heads, axis=-1) for array in projected), strict=True)
keep = np.tile(valid.numpy(), (3, 1))
contexts, weights = zip(*(attend(*head, keep=keep) for head in by_head), strict=True)

assert np.allclose(np.concatenate(contexts, axis=-1) @ W_o.T, theirs.context[0])
assert np.allclose(np.mean(weights, axis=0), theirs.weights[0])
assert (theirs.weights[0, :, 4] == 0).all()  # padding
for number, of_head in enumerate(weights, start=1):
    print(f"head {number}\n{of_head.round(2)}")

# %% [markdown]
# ## The gradient
#
# Why does attention learn at all? Because its weights have a gradient. For one row,
# $\partial \alpha_s / \partial e_j = \alpha_s (\delta_{sj} - \alpha_j) / \tau$. A weight near 0 or 1 has a gradient near 0: once the softmax is
# *saturated*, it hardly learns. ($\delta_{sj}$ is 1 where $s = j$, else 0.)


# %%
def jacobian(energies: Array, temperature: float) -> Array:
    """d weights / d energies of one row: (S,) -> (S, S)."""
    row = softmax(energies[None], temperature)[0]
    return (np.diag(row) - np.outer(row, row)) / temperature


row = queries[5] @ keys.T / np.sqrt(d)  # "maison"
normalizer = SoftmaxNormalizer(2.0)
theirs = torch.autograd.functional.jacobian(
    lambda e: normalizer(e[None, None], None, None).weights[0, 0], torch.tensor(row)
)
assert np.allclose(jacobian(row, 2.0), theirs)

temperatures = np.geomspace(0.05, 20, 60)
plt.figure(figsize=(5, 2.6))
plt.semilogx(temperatures, [np.linalg.norm(jacobian(row, tau)) for tau in temperatures])
plt.xlabel("temperature")
plt.ylabel("norm of the Jacobian")
plt.title("saturated on the left, flat on the right", fontsize=10)
plt.show()

# %% [markdown]
# ## Exercises
#
# 1. With `reach = 0`, what is the context, whatever the query? Which preset of the library needs no query for its window, and which predicts the
#    window from it?
# 2. Double all keys, and leave the values alone. Which temperature gives the old weights again?
# 3. Replace the softmax with `np.maximum(energies, 0)`, divided by its sum. What breaks for a row of negative energies?
#
# Answers: (1) the value at the position; `luong_local_m` needs none, `luong_local_p` predicts it. (2) $\tau = 2$. (3) the sum is 0, and the division
# gives NaN; the exponential is positive everywhere. [Sparsemax](../attention/sparsemax.md) shows how to get zeros without that.
#
# From here: [From the fixed vector on](../attention/idea.md), and the next notebook, [train from
# scratch](train_from_scratch.ipynb).
