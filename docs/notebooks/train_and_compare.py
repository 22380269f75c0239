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
# # Train and compare
#
# Three attentions, two random seeds each: six models, trained for 200 updates on a few thousand short sentences. That takes
# about two minutes on two cores, and it is only **the start of training**: nearly all translations are still wrong, and hardly
# anything separates the three yet, which makes it a good exercise in reading a test. After eight epochs on the whole demo corpus,
# the scores are those of [the results](../results/demo.md): 23 BLEU without attention, 97 with `luong_dot` and 99 with
# `luong_concat`.

# %%
import gzip
import logging
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

import nmt
from nmt.data.corpus import DEMO
from nmt.translate.heatmap import draw_alignment

logging.disable(logging.INFO)  # leave this line out to follow the training
plt.rcParams["figure.dpi"] = 70

# %% [markdown]
# ## A small corpus
#
# The demo corpus comes from a grammar that writes English and French. We keep its sentences of at most nine words, and write two text files
# per split: line N of one translates line N of the other. Your own corpus has the same form.

# %%
folder = Path("corpus")
folder.mkdir(exist_ok=True)
with gzip.open(DEMO, "rt", encoding="utf-8") as file:
    rows = [line.rstrip("\n").split("\t") for line in file][1:]
for split, pairs in {"train": rows[1000:15000], "validation": rows[700:1000], "test": rows[:700]}.items():
    short = [(english, french) for english, french, _ in pairs if len(english.split()) <= 9]
    for language, lines in zip(("en", "fr"), zip(*short, strict=True), strict=True):
        (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{split}: {len(short)} pairs, such as {short[0]}")

data = {"source_lang": "en", "target_lang": "fr"}
data |= {split: str(folder / split) for split in ("train", "validation", "test")}

# %% [markdown]
# ## Training
#
# `nmt.train` takes the words of the command line. The model is small, so that it is quick: 64 units in each direction of the encoder, 128 in the
# decoder. Everything that is not named here has its default.

# %%
small = [
    "tokenizer=word",
    "embedding.dim=64",
    "encoder.hidden=64",
    "decoder.hidden=128",
    "optimizer.lr=0.005",
    "schedule.warmup_steps=50",
    "training.batch_tokens=512",
    "training.max_steps=200",
    "training.max_epochs=100",  # more than 200 updates need
    "training.log_every=20",
    "validation.unit=steps",
    "validation.every=50",
    "validation.samples=1",
]
names, seeds = ["none", "luong_dot", "luong_concat"], [1, 2]
runs = {
    (name, seed): nmt.train(f"attention={name}", f"seed={seed}", *small, data=data) for name in names for seed in seeds
}
for (name, seed), run in runs.items():
    print(f"{name:12} seed {seed}: {run.scores['test']['bleu']:5.2f} BLEU on the test set")

# %% [markdown]
# ## Learning curves
#
# A run keeps what it logged. The two runs of an attention have the same settings and differ only in their random seed, and so in
# the initial parameters, the order of the mini-batches and the dropout masks. Keep the distance between them in mind: it is the
# unit for all that follows.


# %%
def curve(run: nmt.Run, name: str) -> tuple[list[int], list[float]]:
    """The updates at which a value was logged, and the values."""
    points = [(line["step"], line[name]) for line in run.history if name in line]
    steps, values = zip(*points, strict=True)
    return list(steps), list(values)


figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for axes, value, label in zip(
    panels, ("train/loss", "validation/bleu"), ("training loss, nats per token", "validation BLEU"), strict=True
):
    for (name, seed), run in runs.items():
        style = {"color": f"C{names.index(name)}", "linestyle": "-" if seed == 1 else "--"}
        axes.plot(*curve(run, value), label=name if seed == 1 else None, **style)
    axes.set(xlabel="updates", ylabel=label)
panels[0].legend()
plt.show()

# %% [markdown]
# ## The table
#
# `nmt.compare_runs` scores what the runs have translated and tests the differences to a baseline.

# %%
comparison = nmt.compare_runs(list(runs.values()), "baseline=none")
comparison

# %% [markdown]
# ## How to read the test
#
# - **BLEU** is the mean over the seeds, with half of its 95 % interval. With two seeds such an interval is wide: two numbers say little about how
#   far others would spread.
# - **difference** is that to the baseline. Its variance has two parts, the *seeds* and the *sentences* of the test set. With $n_a$ and $n_b$ seeds,
#   $\mathrm{Var}(D) = r_a^2/n_a + r_b^2/n_b + w$, where $w$ comes from bootstrap samples of the sentences. Two seeds may agree by chance, so
#   $r_a^2$ and $r_b^2$ are at least the mean variance of all compared attentions.
# - **raw p** is the probability of a difference at least as large if both attentions were equally good, and **p** is corrected for the two
#   comparisons made here. A star marks p < 0.05.
# - **p, stratified** ignores the seeds: it asks whether *these* runs differ. It can be far below 0.05 where p is not, because the
#   seeds of one attention may differ as much as the attentions do. Whoever trains one model of each and tests the sentences alone
#   publishes luck.
# - **detects** and **seeds needed** say what this experiment could have found, and how many seeds the measured difference would take.
# - **No star is no proof of equality.** It says that two seeds and this test set cannot tell.
# - **A star says nothing about longer training.** Both models are at the start of theirs.
#
# The next cell computes the variance between the seeds and the t value without $w$ by hand.

# %%
scores = {name: np.array([runs[name, seed].scores["test"]["bleu"] for seed in seeds]) for name in names}
of_seeds = {name: values.var(ddof=1) for name, values in scores.items()}
mean = np.mean(list(of_seeds.values()))
for name in names[1:]:
    difference = scores[name].mean() - scores["none"].mean()
    variance = sum(max(of_seeds[system], mean) / len(seeds) for system in (name, "none"))
    print(
        f"{name:12} {difference:+6.2f} BLEU, standard error of the seeds {variance**0.5:.2f}, t = {difference / variance**0.5:.1f}"
    )

# %% [markdown]
# [How differences are tested](../comparison.md#how-differences-are-tested) has the formulae, and simulations that ask whether the star holds its
# level. `comparison.page` is a page for the browser, with pictures and every translated sentence side by side.
#
# ## Heatmaps
#
# One row per French word that beam search wrote, one column per English word. After so few updates the words are wrong, but look
# for the beginning of a diagonal: a model that has begun to read from left to right.

# %%
sentence = "the small dogs see the red house ."
for name in names:
    best = runs[name, 1].translator().translate([sentence])[0]
    print(f"{name:12} {best.text}")
    if best.alignment is not None:
        display(draw_alignment(best.alignment, best.source_tokens, best.tokens, title=name))

# %% [markdown]
# `none` has no weights to draw; [look inside](look_inside.ipynb) shows what else can be drawn.
#
# ## Exercises
#
# 1. Add a third seed to `seeds` and run the notebook again. Which column becomes smaller, and why by more than the root of 2/3?
# 2. Replace "200" by "600". Does the order of the attentions change?
# 3. Take `none` off the list and compare the other two with `"baseline=luong_dot"`. Would you publish the difference?
#
# Answers: (1) the intervals: the variance is divided by three, and the t distribution has more degrees of freedom, which matters more. (2) try
# it: on the whole demo corpus, both leave `none` far behind. (3) not with two seeds, even with a star: train more seeds, and to the end.
