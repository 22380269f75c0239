"""Measure the speed of training and decoding, relative to a large matrix product in the same process.

python scripts/benchmark.py [OPTION ...] [OVERRIDE ...]

Overrides are those of nmt-train: attention=luong_concat decoder.hidden=512 precision=bf16 data=files ...
  --updates N     timed updates (default 30, after N / 3 for warm-up)
  --presets       time every attention preset, in three rounds
  --growth        time growing sentence lengths and vocabulary sizes
  --no-decoding   time only training
  --busy N        time training beside N busy processes, too
  --operations    time the operations of an update by kind, beside the processor's bounds
Writes benchmark.json to its output directory.
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
from competition import competing, processor_share
from operations import operations

from nmt.cli.compose import RunRequest, compose, new_run, without_size
from nmt.cli.run_command import run_command
from nmt.config.checks import config_dir
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.config.schema.training import Beam, Greedy, SearchLimits
from nmt.data.batching import Batches, collate
from nmt.data.prepare import prepare
from nmt.data.prepared_corpus import PreparedCorpus
from nmt.model.build import build_model
from nmt.model.checkpoints import new_model
from nmt.model.decoder import Decoded
from nmt.model.output import Readouts
from nmt.system.machine import Machine, fair_waiting, tune_memory
from nmt.system.text_table import Column, decimals, markdown
from nmt.training.losses import Objective
from nmt.training.trainer import Trainer
from nmt.training.utilisation import SENTENCES, flops_per_token, product_rate
from nmt.translate.translator import Translator

LENGTHS, VOCABULARIES = (10, 20, 40, 80), (4000, 8000, 16000, 32000)
RANDOM_IDS = min(VOCABULARIES)  # random token ids are below this bound
WARM_UP = 3  # least number of updates before timing starts
MOST_SENTENCES = 512  # largest number of sentences to translate
ROUNDS = 3  # how often --presets times each preset


class Bench:
    """One configuration with its model, batches and machine. `vocabulary` replaces both vocabulary sizes."""

    def __init__(self, config: TrainConfig, prepared: PreparedCorpus, vocabulary: int | None = None) -> None:
        self.config, self.prepared = config, prepared
        self.machine = Machine.choose(config.device, config.precision, config.threads)
        torch.manual_seed(config.seed)
        if vocabulary is None:
            self.model = new_model(config, prepared.tokenizers)
        else:
            self.model = build_model(config, vocabulary, vocabulary, (0, 0))
        self.model.to(self.machine.device).train()
        self.objective = Objective(self.model, config, prepared.tokenizers.target.pad)
        self.trainer = Trainer(config, self.model, self.objective, self.plan()[0], self.machine)

    def clock(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        self.machine.synchronize()
        return time.perf_counter()

    def product_rate(self) -> float:
        """Measure the FLOP/s of a large matrix product in the run's precision."""
        return product_rate(self.machine)

    def plan(self) -> tuple[Batches, Any]:
        """Return the batches as in training, and the plan of an epoch."""
        batches = Batches(
            self.prepared.splits["train"],
            self.prepared.tokenizers,
            batch_tokens=self.config.training.batch_tokens,
            batch_sentences=self.config.training.batch_sentences,
            seed=self.config.seed,
            sampling=self.config.tokenizer.sampling_by_side,
        )
        return batches, batches.epoch(0)

    def training(self, updates: int) -> dict[str, Any]:
        """Time whole updates: target tokens per second, share of the product's rate, padding, peak memory and more."""
        batches, plan = self.plan()
        plan, warm_up = plan[:updates], max(WARM_UP, updates // 3)
        if self.trainer.graphed is not None:
            warm_up = 2 * updates  # graphs are recorded when a shape occurs for the second time
        seconds, tokens, padded, rates = 0.0, 0, 0, []
        for step in range(warm_up + updates):
            if step % max(1, updates // 4) == 0:
                rates.append(self.product_rate())
            began = self.clock()
            (batch,) = batches.load(plan[step % len(plan)], 0)
            self.trainer.update([batch])
            if step >= warm_up:
                seconds += self.clock() - began
                tokens += batch.target_tokens
                padded += batch.target_out.numel()
        rate = float(np.median(rates))
        pairs = batches.load(plan[0][:SENTENCES], 0)
        cost = flops_per_token(self.model, pairs, self.trainer.objective.token_loss.pad)
        return {
            "tokens_per_second": tokens / seconds,
            "milliseconds_an_update": 1000 * seconds / updates,
            "tokens_an_update": tokens / updates,
            "padding": 1 - tokens / padded,
            "mflop_per_token": cost / 1e6,
            "product_gflops": rate / 1e9,
            "share_of_product": tokens / seconds * cost / rate if self.has_phases else None,
            "peak_memory_gib": self.peak_memory() / 2**30,
        }

    def operations(self, updates: int) -> list[dict[str, Any]]:
        """Time the operations in this number of updates, by kind."""
        batches, plan = self.plan()

        def update(step: int) -> None:
            (batch,) = batches.load(plan[step % len(plan)], 0)
            self.trainer.update([batch])

        for step in range(WARM_UP):
            update(step)
        return operations(update, updates, self.product_rate)

    @property
    def has_phases(self) -> bool:
        """Does one readout of each token enter the loss? A latent position has several readouts, R-Drop two passes."""
        return not self.model.decoder.sums_over_positions and not self.config.training.r_drop

    def phases(self, updates: int) -> dict[str, float]:
        """Measure the milliseconds per update of each phase."""
        batches, plan = self.plan()
        milliseconds: dict[str, float] = defaultdict(float)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        began = 0.0

        def end(phase: str) -> None:
            nonlocal began
            ended = self.clock()
            milliseconds[phase] += 1000 * (ended - began) / updates
            began = ended

        for step in range(updates):
            began = self.clock()
            (batch,) = batches.load(plan[step % len(plan)], 0)
            batch = batch.to(self.machine.device)
            end("data")
            with self.machine.autocast():
                state = self.model.encode(batch.source, batch.lengths)
                end("encoder")
                embedded = self.model.dropout(self.model.target_embedding(batch.target_in))
                readouts = self.model.decoder(embedded, state).readouts
                end("decoder")
                cut = readouts.detach().requires_grad_()
                loss = self.objective.token_loss.of_decoded(batch, Decoded(cut, Readouts(cut)), batch.target_out)
                (loss.total / batch.target_tokens).backward()
            end("output layer and loss, both ways")
            readouts.backward(cut.grad)
            end("backward")
            torch.nn.utils.clip_grad_norm_(parameters, self.trainer.max_grad_norm)
            self.trainer.optimizer.step()
            self.trainer.optimizer.zero_grad(set_to_none=True)
            end("optimizer")
        return dict(milliseconds)

    def peak_memory(self) -> int:
        """Return the peak of the memory on the GPU in bytes, or else that of the process."""
        if self.machine.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def decoding(bench: Bench) -> list[dict[str, Any]]:
    """Time greedy search and the configured search method on the test split, or else on the validation split. The model
    has hardly learned to predict EOS. Therefore each hypothesis runs to a limit: half the source length plus 10."""
    splits = bench.prepared.splits
    lines = splits.get("test", splits["validation"]).source.lines()[:MOST_SENTENCES]
    limits = {key: value for key, value in bench.config.search.model_dump().items() if key in SearchLimits.model_fields}
    rows = []
    searches = [Greedy(**{**limits, "kind": "greedy"}), bench.config.search]
    for search in searches:
        settings = search.model_copy(update={"max_ratio": 0.5, "min_length": search.max_length})
        translator = Translator(bench.model, bench.prepared.tokenizers, settings, bench.machine)
        translator.translate(lines[:32])
        began = bench.clock()
        translations = translator.translate(lines)
        seconds = bench.clock() - began
        name = f"beam {search.beam_size}" if isinstance(search, Beam) else search.kind
        tokens = sum(len(translation.tokens) for translation in translations)
        speed = {"sentences_per_second": len(lines) / seconds, "tokens_per_second": tokens / seconds}
        rows.append({"search": name, **speed})
    return rows


def busy(bench: Bench, processes: int, updates: int) -> dict[str, Any]:
    """Time training alone and beside busy processes, and compare the slowdown with the share of the processor.
    `share_of_fair` is 1 if training keeps exactly the share of the processor that the kernel leaves to it."""
    alone = bench.training(updates)["tokens_per_second"]
    with competing(processes):
        share = processor_share(torch.get_num_threads())
        beside = bench.training(updates)["tokens_per_second"]
    return {
        "processes": processes,
        "alone": alone,
        "beside": beside,
        "processor_share": share,
        "share_of_fair": beside / (alone * share),
    }


def presets(start: RunRequest, prepared: PreparedCorpus, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time training and search with every attention preset. The preset may replace other configured values.

    A machine may be faster at one time than at another. Therefore each of several rounds times all presets, and the
    result is the median over the rounds.
    """
    benches = {}
    for name in sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml")):
        overrides = [word for word in without_size(start.overrides) if not word.startswith("attention=")]
        try:
            preset = compose("train", TrainConfig, [*overrides, f"size={start.choices['size']}", f"attention={name}"])
        except UserError as error:
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
            continue
        benches[name] = Bench(preset, prepared)
    rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(1, ROUNDS + 1):
        for name, bench in benches.items():
            row = bench.training(max(1, options.updates // ROUNDS))
            if not options.no_decoding:
                row["sentences_per_second"] = decoding(bench)[1]["sentences_per_second"]
            rounds[name].append(row)
            speed = f"{row['tokens_per_second']:,.0f} target tokens/s"
            print(f"round {number} of {ROUNDS}, {name}: {speed}", file=sys.stderr, flush=True)
    return [
        {"attention": name} | {key: _median([row[key] for row in rows]) for key in rows[0]}
        for name, rows in rounds.items()
    ]


def _median(values: list[float | None]) -> float | None:
    """Return the median of numbers, or None if they are None."""
    numbers = [value for value in values if value is not None]
    return float(np.median(numbers)) if numbers else None


def growth(config: TrainConfig, prepared: PreparedCorpus, updates: int) -> list[dict[str, Any]]:
    """Time training for growing sentence lengths, and then for growing vocabularies. Each time, all updates use one
    batch of random sentences of equal length."""
    rows = []
    sizes: list[tuple[int, int | None]] = [(length, None) for length in LENGTHS]
    for length, vocabulary in [*sizes, *((LENGTHS[0], vocabulary) for vocabulary in VOCABULARIES)]:
        bench = Bench(config, prepared, vocabulary)
        shape = max(1, config.training.batch_tokens // length), length
        draw = np.random.default_rng(1)
        sides = [draw.integers(4, min(RANDOM_IDS, tokenizer.vocab_size), shape) for tokenizer in prepared.tokenizers]
        batch = collate(list(sides[0]), list(sides[1]), prepared.tokenizers, np.arange(shape[0]))
        for step in range(WARM_UP + updates):
            if step == WARM_UP:
                began = bench.clock()
            bench.trainer.update([batch])
        speed = batch.target_tokens * updates / (bench.clock() - began)
        rows.append({"length": length, "vocabulary": vocabulary, "tokens_per_second": speed})
    return rows


def measure(start: RunRequest, bench: Bench, prepared: PreparedCorpus, options: argparse.Namespace) -> dict[str, Any]:
    """Collect all results that the options ask for."""
    results: dict[str, Any] = {
        "overrides": start.overrides,
        "machine": bench.machine.describe(),
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in bench.model.parameters()),
        "training": bench.training(options.updates),
        "phases": bench.phases(max(3, options.updates // 3)) if bench.has_phases else {},
    }
    if options.operations:
        results["operations"] = bench.operations(max(3, options.updates // 3))
    if options.busy:
        results["busy"] = busy(bench, options.busy, options.updates)
    if not options.no_decoding:
        results["decoding"] = decoding(bench)
    if options.presets:
        results["presets"] = presets(start, prepared, options)
    if options.growth:
        results["growth"] = growth(start.config, prepared, options.updates)
    return results


def report(results: dict[str, Any]) -> None:
    """Print tables of all results."""
    machine, training = results["machine"], results["training"]
    print(f"{machine['name']}, {machine['device']}, {machine['precision']}, {machine['threads']} threads")
    print(f"{results['parameters']:,} parameters, {training['mflop_per_token']:.1f} MFLOP a target token\n")
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
    total = sum(results["phases"].values())
    phases = [{"part": name, "ms": ms, "share": ms / total} for name, ms in results["phases"].items()]
    share = Column("share", "share", "{:.0%}".format)
    if phases:
        print(markdown(phases, [Column("part", "part"), Column("ms", "ms", decimals(1)), share]))
    if "busy" in results:
        rate, percent = "{:,.0f}".format, "{:.0%}".format
        contention = [
            Column("processes", "busy processes"),
            Column("alone", "tokens/s alone", rate),
            Column("beside", "beside them", rate),
            Column("processor_share", "processor share left", percent),
            Column("share_of_fair", "of the fair rate", percent),
        ]
        print("\n" + markdown([results["busy"]], contention))
    sentences_per_second = Column("sentences_per_second", "sentences/s", decimals(1))
    tables = {
        "operations": [
            Column("kind", "operations"),
            Column("calls", "calls an update", "{:,.0f}".format),
            Column("milliseconds", "ms", decimals(1)),
            share,
            Column("milliseconds_at_bound", "ms at the processor's bound", decimals(1)),
        ],
        "decoding": [Column("search", "search"), sentences_per_second, columns[0]],
        "presets": [Column("attention", "`attention=`"), *columns[:2], columns[3], sentences_per_second],
        "growth": [Column("length", "length"), Column("vocabulary", "vocabulary"), columns[0]],
    }
    for name, table in tables.items():
        if name in results:
            print("\n" + markdown(results[name], table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--presets", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--no-decoding", action="store_true")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="train beside N busy processes, too")
    parser.add_argument("--operations", action="store_true", help="time operations by kind, on a CPU")
    options, sys.argv[1:] = parser.parse_known_args()
    if options.updates < 1 or options.busy < 0:
        parser.error("--updates must be at least 1, and --busy at least 0")
    sys.argv.append("hydra.job.name=benchmark")

    def task(start: RunRequest) -> None:
        config = start.config
        logging.getLogger("nmt").setLevel(logging.WARNING)
        tune_memory()
        if config.training.guided_alignment:
            raise UserError("training.guided_alignment: the benchmark's batches have no alignments; set it to 0")
        if config.objective.kind == "distillation":
            raise UserError("objective=distillation: the benchmark has no teachers; leave it out")
        prepared = prepare(config.data, config.tokenizer)
        bench = Bench(config, prepared)
        if options.operations and bench.machine.device.type != "cpu":
            raise UserError("--operations: only a CPU has finished an operation when it returns; set device=cpu")
        with fair_waiting():
            results = measure(start, bench, prepared, options)
        report(results)
        start.directory.mkdir(parents=True, exist_ok=True)
        path = start.directory / "benchmark.json"
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"\n{path}")

    run_command("train", lambda options: task(new_run(options.overrides)))


if __name__ == "__main__":
    main()
