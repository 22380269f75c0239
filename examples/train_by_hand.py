"""Train a translation model by hand: the parts of nmt and a plain loop, to copy and change.

`python examples/train_by_hand.py` takes half a minute on one core, and ends with a model that translates simple English
sentences to French. What `nmt-train` adds to this loop is what long runs need: checkpoints, resuming, early stopping,
schedules, several processes, GPUs, logs.

Shapes: B sentence pairs, S source positions, T target positions, V tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from nmt.cli.compose import compose
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, collate, plan
from nmt.data.corpus import Pair, splits
from nmt.data.tokenizer import Tokenizers, make_tokenizers
from nmt.model.checkpoints import new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.system.machine import Machine
from nmt.translate.translator import Translator


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


def main(pairs: int = 6000, epochs: int = 3) -> None:
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


if __name__ == "__main__":
    main()
