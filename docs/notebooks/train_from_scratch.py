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
# # Train from scratch
#
# A translation model with attention, trained by a plain PyTorch loop in half a minute on one CPU core. The tokenizer, the
# mini-batches and the layers are parts of nmt; the loop is ours, and so is the forward pass at the end, twelve lines in
# which the whole model can be read. From these it is one step to the cross-attention of a Transformer.
#
# Without the parts from "The model in twelve lines" on, this is the program
# [train_by_hand.py](../../examples/train_by_hand.py), to copy and change.
#
# Shapes: $B$ sentence pairs, $S$ source positions, $T$ target positions, $Q$ units of the decoder, $V$ tokens of the
# vocabulary.

# %%
from collections.abc import Iterator, Sequence
from itertools import chain

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nmt.cli.compose import compose
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, collate, plan
from nmt.data.corpus import Pair, splits
from nmt.data.tokenizer import Tokenizers, make_tokenizers
from nmt.model.checkpoints import new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.system.machine import Machine
from nmt.translate.translator import Translator

plt.rcParams["figure.dpi"] = 70

# %% [markdown]
# ## Text, tokenizer, model
#
# The demo corpus comes with nmt: English sentences of a grammar, and their French translations. A byte-pair encoding of
# 800 pieces is trained on it. The model has a bidirectional GRU as its encoder, another GRU as its decoder, and the
# *general* score of Luong et al. (2015).

# %%
pairs, epochs = 6000, 3
torch.manual_seed(1)
# The values of configs/, but for these. Any attention will do whose only loss is the cross-entropy.
changes = ["attention=luong_general", "decoder.input_feeding=false", "decoder.readout=deep", "search=greedy"]
sizes = ["tokenizer.vocab_size=800", "embedding.dim=64", "encoder.hidden=64", "decoder.hidden=128"]
config = compose("train", TrainConfig, [*changes, *sizes, f"data.train_size={pairs}"])

sources = splits(config.data)
train, validation = ([*chain(*sources[name])] for name in ("train", "validation"))
tokenizers = make_tokenizers(config.tokenizer, [pair.source for pair in train], [pair.target for pair in train])
model = new_model(config, tokenizers)
translator = Translator(model, tokenizers, config.search, Machine.choose("cpu", "fp32", threads=None))

print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
print(train[0].source, "->", train[0].target)
print(tokenizers.source.pieces(tokenizers.source.encode([train[0].source])[0]))

# %% [markdown]
# ## Mini-batches
#
# Sentences of similar length share a batch, so that little of it is padding; the order of the batches is random. The
# decoder is trained by *teacher forcing*: at each step it reads the previous token of the reference, `target_in`, and
# predicts the next one, `target_out`, the same tokens one position on.


# %%
def batches_of(pairs: Sequence[Pair], tokenizers: Tokenizers, seed: int) -> Iterator[Batch]:
    """Yield all pairs, in batches of similar length and in random order."""
    source = tokenizers.source.encode([pair.source for pair in pairs])
    target = tokenizers.target.encode([pair.target for pair in pairs])
    lengths = (np.array([len(ids) for ids in side]) for side in (source, target))
    rng = np.random.default_rng(seed)
    for indices in plan(*lengths, batch_tokens=1024, batch_sentences=None, rng=rng):
        yield collate([source[i] for i in indices], [target[i] for i in indices], tokenizers, indices)


def loss_of(model: Seq2Seq, batch: Batch, criterion: nn.CrossEntropyLoss) -> Tensor:
    """Compute the loss of predicting each target token from the source and the target tokens before it -> ()."""
    decoded = model(batch.source, batch.lengths, batch.target_in)
    logits = decoded.prediction.logits(model.output.layer())  # (B, T, V)
    loss: Tensor = criterion(logits.flatten(0, 1), batch.target_out.flatten())
    return loss


batch = next(batches_of(train, tokenizers, seed=1))
print("B and S:", tuple(batch.source.shape), "  B and T:", tuple(batch.target_in.shape))
for name, row in {"target_in": batch.target_in[0], "target_out": batch.target_out[0]}.items():
    print(f"{name:10}", " ".join(tokenizers.target.pieces(row[:6].tolist())), "...")

# %% [markdown]
# ## The loop
#
# Forward, loss, backward, clip, step. `nmt-train` adds to this what long runs need: checkpoints, resuming, early
# stopping, schedules, several processes, GPUs, logs.

# %%
pad = tokenizers.target.pad
smoothed = nn.CrossEntropyLoss(ignore_index=pad, label_smoothing=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(1, epochs + 1):
    model.train()
    for batch in batches_of(train, tokenizers, seed=epoch):
        optimizer.zero_grad()
        loss_of(model, batch, smoothed).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    model.eval()
    nll, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches_of(validation, tokenizers, seed=0):
            nll += float(loss_of(model, batch, nn.CrossEntropyLoss(ignore_index=pad, reduction="sum")))
            tokens += batch.target_tokens
    print(f"epoch {epoch}: validation loss {nll / tokens:.2f} nats per token")
    for pair in validation[:2]:
        (translation,) = translator.translate([pair.source])
        print(f"    {pair.source}\n    -> {translation.text}")

# %% [markdown]
# A uniform guess among 800 pieces would have a loss of $\log 800 = 6.68$ nats.
#
# ## The model in twelve lines
#
# What has been trained, without nmt's code, for a single sentence pair, so that there is no padding and no mask. The
# encoder turns the source into hidden states $h_s$, the *bridge* makes the decoder's first state from the last ones, and
# the decoder's hidden state $d_t$ has read the target up to its previous word. Then the attention:
#
# $$e_{ts} = \frac{d_t^\top W h_s}{\sqrt Q}, \qquad \alpha_{ts} = \frac{\exp e_{ts}}{\sum_j \exp e_{tj}}, \qquad
# c_t = \sum_s \alpha_{ts} h_s$$
#
# The context vector $c_t$, the state and the previous word make the readout, and its products with the embeddings of all
# target tokens are the logits of the next word. Without attention, the last state of the encoder would be all that the
# decoder learns of the source: a *bottleneck* of 128 numbers for a sentence of any length.

# %%
source_ids = torch.tensor(tokenizers.source.encode(["the small dogs see the red house ."]))  # (1, S)
target_ids = torch.tensor(tokenizers.target.encode(["les petits chiens voient la maison rouge ."]))  # (1, T), </s> last
batch = collate(source_ids.tolist(), target_ids.tolist(), tokenizers, [0])
with torch.no_grad():
    h, last = model.encoder.rnn(model.source_embedding(batch.source))  # (1, S, M) and (2, 1, M / 2)
    first = torch.tanh(model.bridge.proj(last.transpose(0, 1).flatten(1)))  # (1, Q)
    y = model.target_embedding(batch.target_in)  # (1, T, E): the previous words
    d, _ = model.decoder.rnn(y, first[None])  # (1, T, Q)

    Wh = model.decoder.attention.score.bilinear(h)  # (1, S, Q): the keys
    energies = d @ Wh.mT / d.shape[-1] ** 0.5  # (1, T, S)
    weights = energies.softmax(dim=-1)  # (1, T, S)
    c = weights @ h  # (1, T, M): the context vectors

    readout = torch.tanh(model.decoder.readout.proj(torch.cat([d, c, y], dim=-1)))  # (1, T, E)
    logits = readout @ model.target_embedding.weight.T + model.output.bias  # (1, T, V)

    decoded = model(batch.source, batch.lengths, batch.target_in)
    assert torch.allclose(weights, decoded.weights, atol=1e-5)
    assert torch.allclose(logits, decoded.prediction.logits(model.output.layer()), atol=1e-4)

figure, axes = plt.subplots(figsize=(4.6, 4.6))
axes.imshow(weights[0], cmap="viridis", vmin=0, vmax=1)
axes.set_xticks(range(weights.shape[2]), tokenizers.source.pieces(batch.source[0].tolist()), rotation=60)
axes.set_yticks(range(weights.shape[1]), tokenizers.target.pieces(batch.target_out[0].tolist()))
axes.set_title("attention weights", fontsize=10)
plt.show()

# %% [markdown]
# Both ways agree. Each row of the picture is one step of the decoder: which source pieces it looks at before it writes
# the piece on the left.
#
# ## The bridge to cross-attention
#
# The three lines from `energies` to `c` are what a Transformer calls *cross-attention*: the decoder's vectors are the
# *queries*, the encoder's vectors give *keys* and *values*. PyTorch has them as one function:

# %%
with torch.no_grad():
    contexts = scaled_dot_product_attention(query=d, key=Wh, value=h)  # softmax(q k^T / sqrt(Q)) v
assert torch.allclose(contexts, c, atol=1e-5)
print("equal; largest difference", f"{(contexts - c).abs().max():.0e}")

# %% [markdown]
# So what is different in a Transformer?
#
# | | here | in a Transformer |
# |---|---|---|
# | query | $d_t$, the hidden state of a GRU that reads the target word by word | $W_q x_t$, where $x_t$ comes from masked *self-attention* over the target so far, for all $t$ at once |
# | key, value | $W h_s$ and $h_s$, from a GRU that reads the source | $W_k x_s$ and $W_v x_s$, from self-attention over the source |
# | heads | one | several, each with smaller matrices of its own; their results are joined and multiplied by $W_o$ |
# | where | once, before the readout | in every layer of the decoder, each time with a residual connection and layer normalisation |
# | order of the words | from the recurrence | from position embeddings |
#
# The attention is the same. What goes is the recurrence: a GRU must take the steps of a sentence one after the other,
# while self-attention computes them together, which is why Transformers train faster on large machines. The preset
# [`multihead`](../attention/multihead.md) has the heads and the three matrices in a recurrent decoder.
#
# ## Exercises
#
# 1. Replace `luong_general` by `luong_dot` at the top. Which lines of the model have to change?
# 2. Set `weights` to $1/S$ everywhere, and compute the loss of the sentence again. What does the difference measure?
# 3. Train with `attention=none`. How far does the validation loss get in three epochs?
#
# Answers: (1) the keys are the states themselves, `Wh = h`, and nothing is divided by $\sqrt Q$. (2) how much the model gains
# from choosing where to look, rather than always averaging the whole source. (3) try it. The twelve lines do not fit that model:
# it has no context vector, and all that the decoder learns of the source goes through the bottleneck `first`.
