"""Word-level knowledge distillation: a model learns what its teachers predict (Kim and Rush 2016, 3.1).

Shapes: B batch, T target positions, R readout.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.config import schema
from nmt.config.compose import load_config
from nmt.data.batching import Batch
from nmt.data.prepared import Prepared
from nmt.machine import Machine
from nmt.model.load import load_model
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.distillation import DistillationLoss, linear_distillation
from nmt.run import RunDirectory
from nmt.training.start import refuse_other_tokenizers


class Teachers(NamedTuple):
    """Models that are learned from."""

    models: list[Seq2Seq]
    records: list[dict[str, Any]]  # for the manifest: each one's run, and the step and scores of its checkpoint


def load_teachers(config: schema.TrainConfig, prepared: Prepared, machine: Machine) -> Teachers:
    """The best checkpoints of objective.teachers; none where the objective is another.

    Raises UserError if there is none, or if it knows another tokenizer's pieces.
    """
    found = Teachers([], [])
    for place in config.objective.teachers if isinstance(config.objective, schema.Distillation) else []:
        run = RunDirectory.existing(place, "objective.teachers")
        its = load_config(run.config)
        refuse_other_tokenizers("objective.teachers", run, its.tokenizer.lowercase, config, prepared)
        model, checkpoint = load_model(its, prepared.tokenizers, run.checkpoints / "best.pt")
        found.models.append(model.eval().to(machine.device))
        found.records.append({"run": str(run.path), "step": checkpoint["step"], "scores": checkpoint.get("scores", {})})
    return found


def distillation_loss(
    model: Seq2Seq,
    teachers: Sequence[Seq2Seq],
    readouts: Tensor,
    batch: Batch,
    pad: int,
    share: float,
    smoothing: float,
) -> DistillationLoss:
    """(B, T, R), of the batch that the teachers see too, without dropout -> sums over all target tokens."""
    with torch.no_grad():
        decoded = [teacher(batch.source, batch.lengths, batch.target_in) for teacher in teachers]
        taught = [
            teacher.output.operands(its.readouts.flatten(0, 1)) for teacher, its in zip(teachers, decoded, strict=True)
        ]
    operands = model.output.operands(readouts.flatten(0, 1))
    return linear_distillation(*operands, batch.target_out.flatten(), taught, share, smoothing, pad)
