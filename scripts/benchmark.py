"""Speed of training and decoding, beside the rate of a large matrix product in the same run.

python scripts/benchmark.py [OPTION ...] [OVERRIDE ...]

Overrides are those of nmt-train: attention=luong_concat decoder.hidden=512 precision=bf16 data=files ...
  --updates N     updates that count (default 30, after a third as many that do not)
  --presets       a row for every attention preset
  --growth        how training slows with the length of sentences and the size of the vocabulary
  --no-decoding   training alone
Writes benchmark.json into its output directory.
"""

import argparse
import json
import logging
import resource
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from nmt.cli.app import choices, output_dir, run_command
from nmt.config.compose import config_dir, typed
from nmt.config.errors import UserError
from nmt.config.schema import Beam, Greedy, SearchLimits, TrainConfig
from nmt.data.batching import Batch, Batches, collate
from nmt.data.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.data.tokenizer import Tokenizers
from nmt.machine import DTYPES, Machine, tune_memory
from nmt.model.build import build_model
from nmt.model.decoder import Decoded
from nmt.model.load import new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.objectives.objective import Objective
from nmt.ops.matmul import matmul
from nmt.report.table import Column, decimals, markdown
from nmt.training.optimizer import make_optimizer
from nmt.training.step import Updater
from nmt.translator import Translator

SIDE = 2048  # of the matrices whose product the figures are held against
LENGTHS, VOCABULARIES = (10, 20, 40, 80), (4000, 8000, 16000, 32000)
LIMIT = min(VOCABULARIES)  # of random token ids
SENTENCES = 512  # translated at most


class Bench:
    """One configuration: its model, its batches, the machine."""

    def __init__(self, config: TrainConfig, prepared: Prepared, vocabulary: int | None = None) -> None:
        self.config, self.prepared = config, prepared
        self.machine = Machine.choose(config.device, config.precision, config.threads)
        torch.manual_seed(config.seed)
        self.model = new_model(config, prepared.tokenizers) if vocabulary is None else resized(config, vocabulary)
        self.model.to(self.machine.device).train()
        self.objective = Objective(self.model, config, prepared.tokenizers.target)
        self.updater = Updater(
            self.model,
            self.objective,
            make_optimizer(config.optimizer, self.model),
            config.training.max_grad_norm,
            self.machine,
        )

    def clock(self) -> float:
        """Seconds, with nothing left to do on the device."""
        if self.machine.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.machine.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def product_rate(self, repeats: int = 6) -> float:
        """FLOP/s of a large matrix product in the precision of the run."""
        matrix = torch.randn(SIDE, SIDE, device=self.machine.device, dtype=DTYPES[self.machine.precision])
        matmul(matrix, matrix)
        began = self.clock()
        for _ in range(repeats):
            matmul(matrix, matrix)
        return 2 * SIDE**3 * repeats / (self.clock() - began)

    def plan(self) -> tuple[Batches, list[Any]]:
        """The batches of an epoch as training draws them."""
        training = self.config.training
        batches = Batches(
            self.prepared.splits["train"],
            self.prepared.tokenizers,
            batch_tokens=training.batch_tokens,
            batch_sentences=training.batch_sentences,
            seed=self.config.seed,
            sampling=self.config.tokenizer.sampling_by_side,
        )
        return batches, batches.epoch(0)

    def training(self, updates: int) -> dict[str, Any]:
        """Whole updates: target tokens per second, share of the product's rate, padding, memory."""
        batches, plan = self.plan()
        warm = max(3, updates // 3)
        seconds, tokens, padded, rates = 0.0, 0, 0, []
        for step in range(warm + updates):
            if step % max(1, updates // 4) == 0:
                rates.append(self.product_rate())
            began = self.clock()
            (batch,) = batches.load(plan[step % len(plan)], 0)
            self.updater([batch], self.config.optimizer.lr, step + 1)
            if step >= warm:
                seconds += self.clock() - began
                tokens += batch.target_tokens
                padded += batch.target_out.numel()
        rate = float(np.median(rates))
        cost = self.flops_per_token(batches.load(plan[0], 0)[0])
        return {
            "tokens_per_second": tokens / seconds,
            "milliseconds_an_update": 1000 * seconds / updates,
            "tokens_an_update": tokens / updates,
            "padding": 1 - tokens / padded,
            "mflop_per_token": cost / 1e6,
            "product_gflops": rate / 1e9,
            "share_of_product": tokens / seconds * cost / rate,
            "peak_memory_gib": self.peak_memory() / 2**30,
        }

    def phases(self, updates: int) -> dict[str, float]:
        """Milliseconds of an update's parts, from as many updates taken apart."""
        batches, plan = self.plan()
        spent: dict[str, float] = defaultdict(float)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for step in range(updates):
            times = [self.clock()]
            (batch,) = batches.load(plan[step % len(plan)], 0)
            batch = batch.to(self.machine.device)
            times.append(self.clock())
            with self.machine.autocast():
                state = self.model.encode(batch.source, batch.lengths)
                times.append(self.clock())
                embedded = self.model.dropout(self.model.target_embedding(batch.target_in))
                readouts = self.model.decoder(embedded, state).readouts
                times.append(self.clock())
                cut = readouts.detach().requires_grad_()
                loss = self.objective.loss.of_decoded(batch, Decoded(cut), batch.target_out)
                (loss.total / batch.target_tokens).backward()
            times.append(self.clock())
            readouts.backward(cut.grad)
            times.append(self.clock())
            torch.nn.utils.clip_grad_norm_(parameters, self.updater.max_grad_norm)
            self.updater.optimizer.step()
            self.updater.optimizer.zero_grad(set_to_none=True)
            times.append(self.clock())
            names = ("data", "encoder", "decoder", "output layer and loss, both ways", "backward", "optimizer")
            for name, began, ended in zip(names, times, times[1:], strict=False):
                spent[name] += 1000 * (ended - began) / updates
        return dict(spent)

    def flops_per_token(self, batch: Batch) -> float:
        """Of the matrix products of an update: three times those of the forward pass (which its backward doubles)."""
        model = new_model(self.config, self.prepared.tokenizers).double().eval().requires_grad_(False)
        few = slice(0, 8)
        target = batch.target_in[few]
        with FlopCounterMode(display=False) as counter:
            decoded = model(batch.source[few], batch.lengths[few], target)
            model.output(decoded.readouts)
        return 3 * counter.get_total_flops() / int((batch.target_out[few] != self.objective.loss.pad).sum())

    def peak_memory(self) -> int:
        """Bytes, of the process or on the GPU."""
        if self.machine.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resized(config: TrainConfig, vocabulary: int) -> Seq2Seq:
    """The configured model for another size of both vocabularies."""
    return build_model(config, vocabulary, vocabulary, (0, 0))


def decoding(bench: Bench) -> list[dict[str, Any]]:
    """Sentences of the test split per second, or of the validation split where there is no other. The weights are
    those after the timed updates, which know no end, so each hypothesis is made to run to its limit: half the source's
    length and ten tokens."""
    splits = bench.prepared.splits
    lines = splits.get("test", splits["validation"]).source.lines()[:SENTENCES]
    found = []
    for search in (greedy_of(bench.config), bench.config.search):
        settings = search.model_copy(update={"max_ratio": 0.5, "min_length": search.max_length})
        translator = Translator(bench.model, bench.prepared.tokenizers, settings, bench.machine)
        translator.translate(lines[:32])
        began = bench.clock()
        translations = translator.translate(lines)
        seconds = bench.clock() - began
        found.append(
            {
                "search": f"beam {search.beam_size}" if isinstance(search, Beam) else search.kind,
                "sentences_per_second": len(lines) / seconds,
                "tokens_per_second": sum(len(each.tokens) for each in translations) / seconds,
            }
        )
    return found


def greedy_of(config: TrainConfig) -> Greedy:
    """Greedy search with the limits of the configured one."""
    limits = {key: value for key, value in config.search.model_dump().items() if key in SearchLimits.model_fields}
    return Greedy(**{**limits, "kind": "greedy"})


def presets(config: TrainConfig, prepared: Prepared, updates: int) -> list[dict[str, Any]]:
    """Training with every attention preset; all else as configured, but for what a preset sets itself."""
    rows = []
    for name in sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml")):
        given = [each for each in HydraConfig.get().overrides.task if not each.startswith(("attention=", "size="))]
        groups = [f"size={choices()['size']}", f"attention={name}"]
        values = OmegaConf.to_container(compose("train", [*given, *groups]), resolve=True)
        try:
            chosen = typed(TrainConfig, {str(key): value for key, value in dict(values).items()})
        except UserError as error:
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
            continue
        bench = Bench(chosen, prepared)
        rows.append({"attention": name, **bench.training(updates)})
        print(f"{name}: {rows[-1]['tokens_per_second']:,.0f} target tokens/s", file=sys.stderr, flush=True)
    return rows


def growth(config: TrainConfig, prepared: Prepared, updates: int) -> list[dict[str, Any]]:
    """Random sentences of one length, as many as fill a batch: ever longer, then short with ever more vocabulary."""
    rows = []
    for length in LENGTHS:
        bench = Bench(config, prepared)
        batch = random_batch(prepared.tokenizers, max(1, config.training.batch_tokens // length), length)
        rows.append({"length": length, "vocabulary": None, **timed(bench, batch, updates)})
    for vocabulary in VOCABULARIES:
        bench = Bench(config, prepared, vocabulary)
        batch = random_batch(prepared.tokenizers, max(1, config.training.batch_tokens // LENGTHS[0]), LENGTHS[0])
        rows.append({"length": LENGTHS[0], "vocabulary": vocabulary, **timed(bench, batch, updates)})
    return rows


def random_batch(tokenizers: Tokenizers, sentences: int, length: int) -> Batch:
    """Sentences of equal length, from a generator of its own."""
    draw = np.random.default_rng(1)
    sides = [draw.integers(4, min(LIMIT, each.vocab_size), (sentences, length)) for each in tokenizers]
    return collate(list(sides[0]), list(sides[1]), tokenizers, np.arange(sentences))


def timed(bench: Bench, batch: Batch, updates: int) -> dict[str, Any]:
    """The same batch again and again."""
    seconds = 0.0
    for step in range(3 + updates):
        began = bench.clock()
        bench.updater([batch], bench.config.optimizer.lr, step + 1)
        seconds += bench.clock() - began if step >= 3 else 0.0  # noqa: PLR2004
    return {"tokens_per_second": batch.target_tokens * updates / seconds}


def report(found: dict[str, Any]) -> None:
    """Tables of all that was measured."""
    machine, training = found["machine"], found["training"]
    print(f"{machine['name']}, {machine['device']}, {machine['precision']}, {machine['threads']} threads")
    print(f"{found['parameters']:,} parameters, {training['mflop_per_token']:.1f} MFLOP a target token\n")
    columns = [
        Column("tokens_per_second", "target tokens/s", "{:,.0f}".format),
        Column("share_of_product", "of the product's rate", "{:.1%}".format),
        Column("product_gflops", "GFLOP/s of a product", decimals(0)),
        Column("milliseconds_an_update", "ms an update", decimals(1)),
        Column("tokens_an_update", "tokens an update", decimals(0)),
        Column("padding", "padding", "{:.1%}".format),
        Column("peak_memory_gib", "peak memory, GiB", decimals(2)),
    ]
    print(markdown([training], columns), end="\n\n")
    total = sum(found["phases"].values())
    parts = [{"part": name, "ms": ms, "share": ms / total} for name, ms in found["phases"].items()]
    print(
        markdown(
            parts, [Column("part", "part"), Column("ms", "ms", decimals(1)), Column("share", "share", "{:.0%}".format)]
        )
    )
    per_second = Column("tokens_per_second", "target tokens/s", "{:,.0f}".format)
    tables = {
        "decoding": [
            Column("search", "search"),
            Column("sentences_per_second", "sentences/s", decimals(1)),
            per_second,
        ],
        "presets": [Column("attention", "`attention=`"), *columns[:2], *columns[3:4]],
        "growth": [Column("length", "length"), Column("vocabulary", "vocabulary"), per_second],
    }
    for name, each in tables.items():
        if name in found:
            print("\n" + markdown(found[name], each))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--presets", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--no-decoding", action="store_true")
    options, sys.argv[1:] = parser.parse_known_args()
    if options.updates < 1:
        parser.error("--updates must be at least 1")
    sys.argv.append("hydra.job.name=benchmark")

    def task(config: TrainConfig, overrides: list[str]) -> None:
        logging.getLogger("nmt").setLevel(logging.WARNING)
        tune_memory()
        if config.training.guided_alignment:
            raise UserError("training.guided_alignment: the benchmark's batches have no alignments; set it to 0")
        if config.objective.kind == "distillation":
            raise UserError("objective=distillation: the benchmark has no teachers; leave it out")
        prepared = prepare(config.data, config.tokenizer)
        bench = Bench(config, prepared)
        found: dict[str, Any] = {
            "overrides": overrides,
            "machine": bench.machine.describe(),
            "torch": torch.__version__,
            "parameters": sum(parameter.numel() for parameter in bench.model.parameters()),
            "training": bench.training(options.updates),
            "phases": bench.phases(max(3, options.updates // 3)),
        }
        if not options.no_decoding:
            found["decoding"] = decoding(bench)
        if options.presets:
            found["presets"] = presets(config, prepared, options.updates)
        if options.growth:
            found["growth"] = growth(config, prepared, options.updates)
        report(found)
        path = output_dir() / "benchmark.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"\n{path}")

    run_command("train", TrainConfig, task)


if __name__ == "__main__":
    main()
