"""Measure what several processes gain on this machine, and predict it for faster networks.

python scripts/scaling.py [OPTION ...] [OVERRIDE ...]

Overrides are those of nmt-train. Each process takes its share of a batch. The script times an update for several sizes
of a share: in one process alone, in several side by side without exchange, and in several that add up their gradients
(a reduction), in alternating rounds. It also times reductions of several sizes.
  --processes N,...      numbers of processes on this machine (default 2,3)
  --tokens N,...         padded tokens of a process's share (default 1024,2048,4096,8192)
  --rounds N             (default 3)
  --device-speed X,...   predict for devices X times as fast as a process here (default 1,20,100)
Writes scaling.json to its output directory.
"""

import argparse
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing

from nmt.cli.compose import RunRequest, new_run
from nmt.cli.run_command import run_command
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, make_batches
from nmt.data.prepare import prepare
from nmt.model.checkpoints import new_model
from nmt.system.distributed import GradientSum, ProcessGroup
from nmt.system.machine import Machine, tune_memory
from nmt.system.processes import cores
from nmt.system.text_table import Column, decimals, markdown
from nmt.training.losses import Objective
from nmt.training.trainer import Trainer

UPDATES, WARM_UP = 6, 2  # timed and untimed updates in a round
SIZES = (2**16, 2**20, 2**23, 2**25)  # how many numbers a reduction adds up
USUAL = 4096  # target tokens of a share for which efficiency is predicted
KEPT = 0.9  # efficiency for which the necessary target tokens of a share are predicted


class Network(NamedTuple):
    """Machines whose devices add up their gradients in rings, first within each machine, then between machines."""

    name: str
    devices: int  # per machine
    machines: int
    within: float  # bytes per second from a device to another device of the same machine
    between: float  # bytes per second from a machine to another machine
    latency: float  # seconds per message

    def seconds(self, size: float) -> float:
        """Predict the time of a reduction of `size` bytes. In a ring of n, each member sends 2 (n - 1) / n of the
        bytes, in 2 (n - 1) messages."""
        rings = ((self.devices, self.within), (self.machines, self.between))
        return sum(2 * (n - 1) / n * size / speed + 2 * (n - 1) * self.latency for n, speed in rings if n > 1)


NETWORKS = [
    Network("8 GPUs, NVLink (300 GB/s)", 8, 1, 300e9, 1.0, 10e-6),
    Network("8 GPUs, PCIe (20 GB/s)", 8, 1, 20e9, 1.0, 15e-6),
    Network("4 x 8 GPUs, 100 Gb/s", 8, 4, 300e9, 12.5e9, 30e-6),
    Network("64 x 8 GPUs, 100 Gb/s", 8, 64, 300e9, 12.5e9, 30e-6),
    Network("64 x 8 GPUs, 400 Gb/s", 8, 64, 300e9, 50e9, 30e-6),
]


def line_through(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Fit a >= 0 and b of y = a + b x, by least squares of relative errors."""
    weights = 1 / np.asarray(ys)
    table = np.stack([np.ones(len(xs)), xs], axis=1) * weights[:, None]
    a, b = np.linalg.lstsq(table, np.asarray(ys) * weights, rcond=None)[0]
    if a < 0:
        return 0.0, float(np.sum(ys) / np.sum(xs))
    return float(a), float(b)


def batches_of(config: TrainConfig, tokens: int) -> list[Batch]:
    """Load the first batches of an epoch, each with about this number of padded tokens."""
    prepared = prepare(config.data, config.tokenizer)
    training = config.training.model_copy(update={"batch_tokens": tokens, "batch_sentences": None})
    batches = make_batches(prepared, "train", config.model_copy(update={"training": training}))
    plan = batches.epoch(0)
    return [batches.load(plan[i % len(plan)], 0)[0] for i in range(UPDATES)]


def measure(rank: int, size: int, port: int, config: TrainConfig, options: argparse.Namespace, path: Path) -> None:
    """Measure as one of `size` processes. Rank 0 writes its results to `path`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    logging.getLogger("nmt").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    tune_memory()
    with ProcessGroup.join() as group:
        machine = Machine.choose("cpu" if config.device == "auto" else config.device, config.precision, 1)
        prepared = prepare(config.data, config.tokenizer)
        torch.manual_seed(1)
        model = new_model(config, prepared.tokenizers).to(machine.device).train()
        objective = Objective(model, config, prepared.tokenizers.target.pad)
        trainer = Trainer(config, model, objective, make_batches(prepared, "train", config), machine)
        reduction = GradientSum([*model.parameters()], torch.float32)
        largest = options.tokens[-1]
        batches = {tokens: batches_of(config, tokens) for tokens in options.tokens}
        target_tokens = {tokens: float(np.mean([b.target_tokens for b in batches[tokens]])) for tokens in batches}

        def updates(tokens: int, together: bool) -> float:
            trainer.gradient_sum = reduction if together else None
            for step in range(WARM_UP + UPDATES):
                if step == WARM_UP:
                    began = time.perf_counter()
                batch = batches[tokens][step % UPDATES]
                trainer.update([batch], batch.target_tokens * size)
            return (time.perf_counter() - began) / UPDATES

        alone: dict[int, list[float]] = {tokens: [] for tokens in options.tokens}
        side_by_side: list[float] = []
        together: list[float] = []
        for _ in range(options.rounds):
            if group.is_main:
                for tokens in options.tokens:
                    alone[tokens].append(updates(tokens, False))
            group.wait()  # until here, the other processes are idle
            side_by_side.append(updates(largest, False))
            group.wait()
            together.append(updates(largest, True))
        reductions = {
            f"{numbers} {name}": time_reduction(numbers, dtype, group)
            for numbers in SIZES
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        }
        if group.is_main:
            result = {
                "processes": size,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "target_tokens": target_tokens,
                "alone": {tokens: float(np.median(each)) for tokens, each in alone.items()},
                "side_by_side": float(np.median(side_by_side)),
                "together": float(np.median(together)),
                "reductions": reductions,
            }
            path.write_text(json.dumps(result), encoding="utf-8")


def time_reduction(numbers: int, dtype: torch.dtype, group: ProcessGroup) -> float:
    """Measure the seconds that a reduction of this many numbers takes: the median of several."""
    tensor, seconds = torch.zeros(numbers, dtype=dtype), []
    for _ in range(7):
        group.wait()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def local(config: TrainConfig, size: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start `size` processes on this machine, and return their measurements."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    path = folder / f"processes-{size}.json"
    multiprocessing.spawn(measure, (size, port, config, options, path), nprocs=size)
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return result


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute the measured and the predicted gain of each number of processes over one process with one thread."""
    rows = []
    first = results[0]
    for result in results:
        size, (largest, one) = result["processes"], list(result["alone"].items())[-1]
        # In a ring of n, each process sends 2 (n - 1) / n of the bytes. Processes that share a core take turns.
        reduce = reduction_seconds(first["reductions"], "fp32", result["parameters"])
        reduce *= (1 - 1 / size) / (1 - 1 / first["processes"]) * max(1.0, size / cores())
        rows.append(
            {
                "processes": size,
                "tokens": result["target_tokens"][largest],
                "alone": result["target_tokens"][largest] / one,
                "together": size * result["target_tokens"][largest] / result["together"],
                "gain": size * one / result["together"],
                "shared": result["side_by_side"] / one,
                "predicted": size * one / (result["side_by_side"] + reduce),
            }
        )
    return rows


def reduction_seconds(reductions: dict[str, float], name: str, numbers: float) -> float:
    """Predict the time of a reduction of any size, by a line through the measured times."""
    points = {float(key.split()[0]): value for key, value in reductions.items() if key.endswith(name)}
    fixed, each = line_through(list(points), list(points.values()))
    return fixed + each * numbers


def predictions(result: dict[str, Any], speeds: list[float]) -> list[dict[str, Any]]:
    """Predict the efficiency on other networks: the share of the time in which devices compute."""
    tokens = [result["target_tokens"][key] for key in result["alone"]]
    fixed, each = line_through(tokens, list(result["alone"].values()))
    rows = []
    for network in NETWORKS:
        for speed in speeds:
            row: dict[str, Any] = {"network": network.name, "speed": speed}
            for name, size in (("fp32", 4), ("bf16", 2)):
                reduce = network.seconds(size * result["parameters"])
                compute = (fixed + each * USUAL) / speed
                row[f"reduce_{name}"] = 1000 * reduce
                row[f"efficiency_{name}"] = compute / (compute + reduce)
                row[f"tokens_{name}"] = max(0.0, (KEPT / (1 - KEPT) * reduce * speed - fixed) / each)
            rows.append(row)
    return rows


def report(results: dict[str, Any]) -> None:
    """Print the tables."""
    count, percent = "{:,.0f}".format, "{:.0%}".format
    local_columns = [
        Column("processes", "processes"),
        Column("tokens", "target tokens of a share", count),
        Column("alone", "one process, tokens/s", count),
        Column("together", "all, tokens/s", count),
        Column("shared", "an update, side by side / alone", decimals(2)),
        Column("gain", "gain", decimals(2)),
        Column("predicted", "predicted gain", decimals(2)),
    ]
    print(markdown(results["local"], local_columns), end="\n\n")
    columns = [Column("network", "network"), Column("speed", "device speed", "{:g}".format)]
    for name in ("fp32", "bf16"):
        columns += [
            Column(f"reduce_{name}", f"ms a reduction, {name}", decimals(2)),
            Column(f"efficiency_{name}", f"efficiency at {USUAL:,} tokens", percent),
            Column(f"tokens_{name}", "tokens for 90 %", count),
        ]
    print(markdown(results["predictions"], columns))


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of numbers with commas between them."""
    return lambda text: [kind(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=numbers(int), default=[2, 3])
    parser.add_argument("--tokens", type=numbers(int), default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device-speed", type=numbers(float), default=[1.0, 20.0, 100.0])
    options, sys.argv[1:] = parser.parse_known_args()
    if min(options.processes) < 2 or min(options.tokens) < 1 or options.rounds < 1 or min(options.device_speed) <= 0:  # noqa: PLR2004
        parser.error("--processes must be at least 2, the others above 0")
    options.tokens = sorted(set(options.tokens))
    sys.argv.append("hydra.job.name=scaling")

    def task(start: RunRequest) -> None:
        config, folder = start.config, start.directory
        logging.getLogger("nmt").setLevel(logging.WARNING)
        prepare(config.data, config.tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        measured = [local(config, size, options, folder) for size in options.processes]
        results = {
            "overrides": start.overrides,
            "local": summary(measured),
            "measured": measured,
            "predictions": predictions(measured[0], options.device_speed),
        }
        report(results)
        (folder / "scaling.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"\n{folder / 'scaling.json'}")

    run_command("train", lambda options: task(new_run(options.overrides)))


if __name__ == "__main__":
    main()
