"""Time the updates of attention presets on the demo corpus: seconds an epoch, one preset after another.

python scripts/time_presets.py [PRESET ...] [--threads 1] [--updates 40]
"""

import argparse
import statistics
import time

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nmt.config.compose import config_dir, typed
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batches
from nmt.data.prepare import prepare
from nmt.machine import Machine
from nmt.training.objective import Objective
from nmt.training.step import Updater, make_optimizer
from nmt.translator import new_model


def seconds_an_epoch(preset: str, threads: int, updates: int) -> float:
    """From the median of so many updates, after a few that do not count; the same batches for every preset."""
    OmegaConf.register_new_resolver("run_dir", lambda run, new: new, replace=True)
    values = OmegaConf.to_container(compose("train", [f"attention={preset}", f"threads={threads}"]), resolve=True)
    config = typed(TrainConfig, {str(key): value for key, value in dict(values).items()})
    machine = Machine.choose(config.device, config.precision, config.threads)
    prepared = prepare(config.data, config.tokenizer)
    torch.manual_seed(config.seed)
    model = new_model(config, prepared.tokenizers).to(machine.device).train()
    objective = Objective(model, config, prepared.tokenizers.target.pad)
    optimizer = make_optimizer(config.optimizer, model)
    updater = Updater(model, objective, optimizer, config.training.max_grad_norm, machine)
    tokens = config.training.batch_tokens
    batches = Batches(
        prepared.splits["train"], prepared.tokenizers, batch_tokens=tokens, batch_sentences=None, seed=config.seed
    )
    plan = batches.epoch(0)
    times = []
    for step, indices in enumerate(plan[: updates + 5], 1):
        began = time.perf_counter()
        updater(batches.load(indices, 0), config.optimizer.lr, step)
        times.append(time.perf_counter() - began)
    return statistics.median(times[5:]) * len(plan)


def main() -> None:
    """Entry point."""
    presets = sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=presets, help="attention presets; all of them if none is named")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--updates", type=int, default=40)
    arguments = parser.parse_args()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        for preset in arguments.presets:
            print(f"{preset:<16} {seconds_an_epoch(preset, arguments.threads, arguments.updates):6.1f}", flush=True)


if __name__ == "__main__":
    main()
