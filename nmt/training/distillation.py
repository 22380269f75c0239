"""Word-level knowledge distillation: a model learns what its teachers predict (Kim and Rush 2016, 3.1).

Shapes: B batch, T target positions, R readout.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.config import schema
from nmt.config.compose import load_config
from nmt.config.errors import UserError
from nmt.data.batching import Batch
from nmt.data.prepared import Prepared
from nmt.machine import Machine
from nmt.model.load import load_model
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.distillation import DistillationLoss, linear_distillation
from nmt.run import RunDirectory
from nmt.training.start import record_of, refuse_other_tokenizers


class Teachers(NamedTuple):
    """Models that are learned from."""

    models: list[Seq2Seq]
    records: list[dict[str, Any]]  # of each, for the manifest


def load_teachers(
    config: schema.TrainConfig, prepared: Prepared, machine: Machine, before: Sequence[Mapping[str, Any]] = ()
) -> Teachers:
    """The best checkpoints of objective.teachers; none where the objective is another.

    Raises UserError if there is none, if it knows another tokenizer's pieces, or if it is not what the run learned
    from `before`, of which there are the records then.
    """
    found = Teachers([], [])
    for place in config.objective.teachers if isinstance(config.objective, schema.Distillation) else []:
        run = RunDirectory.existing(place, "objective.teachers")
        its = load_config(run.config)
        try:
            refuse_other_tokenizers("objective.teachers", run, its.tokenizer.lowercase, config, prepared)
        except UserError as error:
            if found.records:  # its remedy would be another one for each
                first = found.records[0]["run"]
                raise UserError(f"objective.teachers: {first} and {run.path} have different tokenizers") from error
            raise
        model, checkpoint = load_model(its, prepared.tokenizers, run.checkpoints / "best.pt")
        found.models.append(model.eval().to(machine.device))
        found.records.append(record_of(run, checkpoint))
    if before:
        _refuse_others(found.records, before)
    return found


def _refuse_others(records: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
    """Teachers may have moved. Raises UserError if it is not the same checkpoints, in the same order."""
    if len(records) != len(before):
        raise UserError(f"objective.teachers: this run began with {len(before)}, not {len(records)}")
    for its, then in zip(records, before, strict=True):
        if any(its[key] != then.get(key) for key in ("step", "scores")):
            raise UserError(
                f"objective.teachers: {its['run']} has another best checkpoint (of step {its['step']}) than what this "
                f"run began with (step {then.get('step')} of {then.get('run')}); give that one, or start a new run"
            )


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
