"""Run updates and searches on fake CUDA tensors, and print as JSON what the device would do.

    LD_PRELOAD=LIBRARY python run_on_fake_cuda.py CASE...

LIBRARY: the compiled fake_cuda.cpp. CASE: overrides of nmt-train separated by spaces. Each case prints a line of JSON:
the kernels per target step, forward and backward; the places that wait for the device, with their number, in an update
and in a step of each search method; and the places of a recorded update that wait or copy between host and device.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from conftest import tiny_config
from fake_cuda import CUDA, FakeCUDA, on_cuda, replace_libraries

from nmt.config import schema
from nmt.config.schema.training import SGD
from nmt.data.batching import Batch, collate
from nmt.model.build import build_model
from nmt.model.seq2seq import SearchEnsemble, Seq2Seq
from nmt.ops.products import pack
from nmt.system.machine import Machine
from nmt.training.cuda_graphs import pad_to, padded_shape
from nmt.training.losses import Objective
from nmt.training.trainer import Trainer
from nmt.translate.beam import beam_search
from nmt.translate.sampling import rollout
from nmt.translate.search import Limits, SearchBatch, Symbols
from nmt.translate.search_model import SearchModel
from nmt.translate.selection import Scorer, Selection

PAD, BOS, EOS, V = 0, 2, 3, 50
LATE = 10_000  # an update at which all loss terms have started
PENALTY = Scorer("average", 1.0)
TARGET = cast(Any, SimpleNamespace(pad=PAD, bos=BOS, eos=EOS))
TOKENIZERS = cast(Any, SimpleNamespace(source=TARGET, target=TARGET))
Counts = tuple[int, dict[str, int]]  # number of kernels; place -> number of waits


def batch_of(steps: int, guided: bool) -> Batch:
    """Make a batch of three pairs; the longest target has `steps` tokens."""
    rng = np.random.default_rng(0)
    source, target = ([[*rng.integers(4, V, n - 1), EOS] for n in each] for each in ((9, 5, 3), (steps, 2, 3)))
    batch = collate(source, target, TOKENIZERS, np.arange(3))
    return batch._replace(alignment=torch.rand(3, steps, 9).softmax(-1)) if guided else batch


def counted(mode: FakeCUDA, work: Any) -> Counts:  # noqa: ANN401
    mode.kernels.clear()
    mode.waits.clear()
    with mode:
        work()
    return sum(mode.kernels.values()), dict(mode.waits)


def trainer_of(mode: FakeCUDA, config: schema.TrainConfig, machine: Machine) -> Trainer:
    model = cast(Seq2Seq, on_cuda(build_model(config, V, V, (PAD, PAD)), mode)).train()
    teachers = [model] if config.objective.kind == "distillation" else []
    with mode:
        objective = Objective(model, config, PAD, teachers)
    # SGD, because torch checks capturable and fused optimizers against a real device.
    values = SGD.model_validate({"kind": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0})
    training = config.training.model_copy(update={"max_grad_norm": 1.0, "cuda_graphs": 0})
    config = config.model_copy(update={"optimizer": values, "training": training})
    return Trainer(config, model, objective, cast(Any, SimpleNamespace(epoch=lambda _: [0])), machine)


def update_counts(mode: FakeCUDA, config: schema.TrainConfig, machine: Machine, steps: int) -> tuple[int, Counts]:
    """Count the kernels of the forward pass, and the kernels and waits of a whole update."""
    trainer = trainer_of(mode, config, machine)
    batch = batch_of(steps, config.training.guided_alignment > 0)

    def forward() -> None:
        with machine.autocast():
            trainer.objective(batch.to(CUDA), 1)

    return counted(mode, forward)[0], counted(mode, lambda: trainer.update([batch]))


def recorded_transfers(mode: FakeCUDA, config: schema.TrainConfig, machine: Machine) -> list[str] | None:
    """List the places that wait or copy within the passes that a graph would record; None if it would record none."""
    trainer = trainer_of(mode, config, machine)
    if not trainer.objective.can_be_recorded(LATE):
        return None
    batch = batch_of(4, config.training.guided_alignment > 0)
    padded = pad_to(batch, padded_shape(batch), PAD, PAD)
    with mode:
        on_device = padded.to(CUDA)
        on_device = on_device._replace(lengths=padded.lengths.to(CUDA))
        tokens = torch.ones((), device=CUDA)
        mode.transfers.clear()
        mode.waits.clear()
        trainer.forward_backward(on_device, tokens, LATE)
    return [*mode.transfers, *mode.waits]


def search_counts(
    mode: FakeCUDA,
    config: schema.TrainConfig,
    machine: Machine,
    steps: int,
    beam: int,
    members: int = 1,
) -> Counts:
    models = [cast(Seq2Seq, on_cuda(build_model(config, V, V, (PAD, PAD)), mode)).eval() for _ in range(members)]
    batch, symbols = batch_of(3, False), Symbols(BOS, EOS, (PAD, BOS))
    limits = Limits(0, [steps, 1, 2])

    @torch.no_grad()
    def search() -> None:
        with machine.autocast():
            prepared = [SearchModel(model, beam, pack) for model in models]
            model: Any = prepared[0] if members == 1 else SearchEnsemble(prepared)
            state = model.encode(batch.source.to(CUDA, non_blocking=True), batch.lengths)
            sentences = SearchBatch(model.step, state, symbols, limits, CUDA)
            if beam > 1:
                beam_search(sentences, Selection(beam, EOS), scorer=PENALTY)
            else:
                rollout(sentences, lambda log_probs, _: log_probs.argmax(-1))

    return counted(mode, search)


def added(more: dict[str, int], fewer: dict[str, int]) -> dict[str, int]:
    extra = {place: count - fewer.get(place, 0) for place, count in more.items()}
    return {place: count for place, count in extra.items() if count}


def measure(overrides: list[str]) -> dict[str, Any]:
    """Measure a configuration: the counts of an update and of the search methods, and what one more step adds."""
    mode = FakeCUDA()
    config = tiny_config("device=cuda", *overrides)
    machine = Machine(CUDA, config.precision)
    forward, update = update_counts(mode, config, machine, 4)
    shorter_forward, shorter_update = update_counts(mode, config, machine, 3)
    searches = {}
    wanted = {"greedy": (1, 1), "beam": (3, 1)}
    if len(overrides) > 2:  # the large cases also test an ensemble
        wanted["ensemble"] = (3, 2)
    for name, (beam, members) in wanted.items():
        two, three = (search_counts(mode, config, machine, steps, beam, members) for steps in (2, 3))
        searches[name] = {"kernels of a step": three[0] - two[0], "waits of a step": added(three[1], two[1])}
    return {
        "update waits": update[1],
        "recorded transfers": recorded_transfers(mode, config, machine),
        "forward kernels": forward - shorter_forward,
        "backward kernels": update[0] - shorter_update[0] - (forward - shorter_forward),
        "searches": searches,
    }


def main() -> None:
    """Run the cases of the command line."""
    replace_libraries(setattr)
    for case in sys.argv[1:]:
        print(json.dumps({"case": case, **measure(case.split())}), flush=True)
    # Exit without the interpreter's shutdown: autograd's thread may still free the last pass through the Python mode,
    # which would abort the process.
    os._exit(0)


if __name__ == "__main__":
    main()
