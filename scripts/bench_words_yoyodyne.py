"""Train yoyodyne's attentive LSTM on words, and print its throughput as JSON: the part of bench_words.py that runs in
yoyodyne's own environment.

python bench_words_yoyodyne.py TRAIN.tsv DEV.tsv WARM_UP UPDATES THREADS EPOCHS
"""
# ruff: noqa: ANN001, ANN201, ANN204

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning
import torch
from yoyodyne import data, models
from yoyodyne.models import modules

BATCH, EMBEDDING, HIDDEN, BEAM = 64, 128, 256, 5
PAD = 0


class Clock(lightning.Callback):
    """Sums the target symbols and seconds of the updates after the warm-up, and keeps the epoch with the lowest WER."""

    def __init__(self, warm_up, module, dev):
        self.warm_up, self.module, self.dev = warm_up, module, dev
        self.symbols, self.seconds, self.began = 0, 0.0, None
        self.best = (float("inf"), None)

    def on_train_epoch_start(self, trainer, model):
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, model, outputs, batch, index):
        now = time.perf_counter()
        if trainer.global_step > self.warm_up:
            self.seconds += now - self.began
            self.symbols += int((batch.target.tensor != PAD).sum())
        self.began = now

    def on_train_epoch_end(self, trainer, model):
        if trainer.max_epochs > 0:
            rate = wer(model, self.module, self.dev)
            if rate < self.best[0]:
                self.best = rate, {key: value.clone() for key, value in model.state_dict().items()}
            print(trainer.current_epoch, rate, file=sys.stderr, flush=True)


def wer(model, module, dev, beam=1):
    """Compute the percentage of words whose predicted phones are not exactly right."""
    mapper = data.Mapper(module.index)
    model.eval()
    model.beam_width = beam
    predictions = []
    with torch.no_grad():
        for batch in module.predict_dataloader():
            tokens = model(batch)[0][:, 0] if beam > 1 else model(batch).argmax(1)
            predictions += [" ".join(mapper.decode_target(row)) for row in tokens]
    model.beam_width = 1
    model.train()
    references = [line.split("\t")[1] for line in dev.read_text(encoding="utf-8").splitlines()]
    assert len(predictions) == len(references)
    return 100 * sum(map(str.__ne__, predictions, references)) / len(references)


def main(train, dev, warm_up, updates, threads, epochs):
    lightning.seed_everything(1, verbose=False)
    torch.set_num_threads(threads)
    with TemporaryDirectory() as folder:
        module = data.DataModule(model_dir=folder, train=str(train), predict=str(dev), target_sep=" ", batch_size=BATCH)
        encoder = modules.LSTMEncoder(embedding_size=EMBEDDING, hidden_size=HIDDEN, layers=1, bidirectional=True)
        model = models.SoftAttentionLSTMModel(
            source_encoder=encoder,
            embedding_size=EMBEDDING,
            decoder_hidden_size=HIDDEN,
            vocab_size=module.vocab_size,
            target_vocab_size=module.target_vocab_size,
        )
        clock = Clock(warm_up, module, dev)
        length = {"max_epochs": epochs} if epochs else {"max_steps": warm_up + updates}
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **length,
        )
        trainer.fit(model, module.train_dataloader())
        found = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "tokens_per_second": clock.symbols / clock.seconds,
        }
        if epochs:
            model.load_state_dict(clock.best[1])
            found["wer"] = wer(model, module, dev, BEAM)
    print(json.dumps(found))


if __name__ == "__main__":
    tables, numbers = sys.argv[1:3], sys.argv[3:]
    main(*map(Path, tables), *map(int, numbers))
