"""What a run starts from or learns from: pretrained vectors, the weights of another run, teachers of a distillation."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.config import schema
from nmt.config.compose import flatten
from nmt.config.errors import UserError
from nmt.config.overrides import for_shell
from nmt.config.schema.model import Model
from nmt.config.schema.training import Distillation
from nmt.data.prepared import Prepared
from nmt.data.tokenizer import Tokenizers
from nmt.model.checkpoints import BEST, load_model, new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.system.files import read_bytes
from nmt.system.machine import Machine
from nmt.system.run import RunDirectory
from nmt.system.saved_config import load_config
from nmt.training.transfer import transfer_weights
from nmt.training.vectors import load_pretrained

INITIAL = {"embedding.pretrained", "embedding.frozen"}  # values of a model that give it no other weights


class Start(NamedTuple):
    """Initial weights."""

    weights: dict[str, Tensor]
    record: dict[str, Any]  # where they come from, for the manifest: {"start_from": ...} or {"pretrained": ...}
    description: list[str]  # lines for the log


class Teachers(NamedTuple):
    """The models that a distillation learns from."""

    models: list[Seq2Seq]
    records: list[dict[str, Any]]  # of their runs, for the manifest


def load_start(config: schema.TrainConfig, prepared: Prepared) -> Start | None:
    """Initial weights: the best checkpoint of training.start_from, or a model with embedding.pretrained; None without
    either.

    With other tokenizers than the run's, its vectors move to the new vocabulary. Raises UserError if the weights do not
    fit the model, or if a file of vectors does not.
    """
    if config.embedding.pretrained is not None:
        model = _new_model(config, prepared)
        found = load_pretrained(model, config.embedding.pretrained, prepared.tokenizers)
        record = {side: one._asdict() for side, one in found.items()}
        return Start(model.state_dict(), {"pretrained": record}, [one.describe(side) for side, one in found.items()])
    if config.training.start_from is None:
        return None
    run = RunDirectory.existing(config.training.start_from, "training.start_from")
    saved = load_config(run.config)
    tokenizers = Tokenizers.load(run.path, saved.tokenizer.lowercase)
    path = run.checkpoints / BEST
    try:
        model, checkpoint = load_model(config, tokenizers, path)
    except UserError:
        if path.is_file() and (differences := model_differences(saved, config)):
            raise UserError(
                f"training.start_from={run.source}: its weights do not fit this model ({'; '.join(differences)})"
            ) from None
        raise
    record = record_of(run, checkpoint)
    lines = [f"initial weights: step {record['step']} of {record['run']}"]
    if all(old.same_as(new) for old, new in zip(tokenizers, prepared.tokenizers, strict=True)):
        return Start(model.state_dict(), {"start_from": record}, lines)
    new = _new_model(config, prepared).state_dict()
    weights, origins = transfer_weights(model.state_dict(), new, tokenizers, prepared.tokenizers)
    record["vocabulary"] = {side: origin.counts() for side, origin in origins.items()}
    lines += [f"another {side} tokenizer: {origin.describe()}" for side, origin in origins.items()]
    return Start(weights, {"start_from": record}, lines)


def _new_model(config: schema.TrainConfig, prepared: Prepared) -> Seq2Seq:
    torch.manual_seed(config.seed)
    return new_model(config, prepared.tokenizers)


def load_teachers(
    config: schema.TrainConfig, prepared: Prepared, machine: Machine, recorded: Sequence[Mapping[str, Any]] = ()
) -> Teachers:
    """The best checkpoints of objective.teachers; none if the objective is another.

    `recorded`: the records of a run that is resumed. Raises UserError if a teacher is missing, has other tokenizers, or
    has another best checkpoint than recorded.
    """
    teachers = Teachers([], [])
    for path in config.objective.teachers if isinstance(config.objective, Distillation) else []:
        run = RunDirectory.existing(path, "objective.teachers")
        saved = load_config(run.config)
        try:
            refuse_other_tokenizers("objective.teachers", run, saved.tokenizer.lowercase, config, prepared)
        except UserError as error:
            if teachers.records:  # the remedy would name a different tokenizer for each teacher
                first = teachers.records[0]["run"]
                raise UserError(f"objective.teachers: {first} and {run.source} have different tokenizers") from error
            raise
        model, checkpoint = load_model(saved, prepared.tokenizers, run.checkpoints / BEST)
        teachers.models.append(model.eval().to(machine.device))
        teachers.records.append(record_of(run, checkpoint))
    if recorded:
        _refuse_other_teachers(teachers.records, recorded)
    return teachers


def _refuse_other_teachers(records: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError unless these are the same checkpoints in the same order; their runs may have moved."""
    if len(records) != len(recorded):
        raise UserError(f"objective.teachers: this run began with {len(recorded)}, not {len(records)}")
    for now, before in zip(records, recorded, strict=True):
        if any(now[key] != before.get(key) for key in ("step", "scores")):
            raise UserError(
                f"objective.teachers: the best checkpoint of {now['run']} (step {now['step']}) is not the one this run "
                f"began with (step {before.get('step')} of {before.get('run')}); name that one, or start a new run"
            )


def record_of(run: RunDirectory, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest records of a run: which one it is, the step and scores of its best checkpoint, its system."""
    best = {"step": checkpoint["step"], "scores": checkpoint.get("scores", {})}
    return {"run": str(run.source), **best, "system": run.system_digest()}


def refuse_other_tokenizers(
    key: str, run: RunDirectory, lowercase: bool, config: schema.TrainConfig, prepared: Prepared
) -> None:
    """Raises UserError, naming the configuration's `key`, unless the run has the corpus's tokenizers."""
    names = ["tokenizer.model"] if (run.path / "tokenizer.model").is_file() else ["source.model", "target.model"]
    paths = [run.path / names[0], run.path / names[-1]]
    same = [
        path.is_file() and read_bytes(path) == own.model for path, own in zip(paths, prepared.tokenizers, strict=True)
    ]
    if all(same) and lowercase == config.tokenizer.lowercase:
        return
    models = zip(("source_model", "target_model"), dict.fromkeys(paths), strict=False)
    remedy = ["tokenizer=file", *(for_shell(f"tokenizer.{name}", path) for name, path in models)]
    if lowercase:
        remedy.append("tokenizer.lowercase=true")
    raise UserError(
        f"{key}={run.source}: was trained with another tokenizer than this run; use the same one: {' '.join(remedy)}"
    )


def model_differences(saved: schema.TrainConfig, config: schema.TrainConfig) -> list[str]:
    """The values that give the two models other weights, in words."""
    here, there = (
        dict(flatten(values.model_dump(mode="json", include=set(Model.model_fields)))) for values in (config, saved)
    )
    return [
        f"{key} is {there.get(key)} there, {here.get(key)} here"
        for key in {**there, **here}
        if there.get(key) != here.get(key) and "dropout" not in key and key not in INITIAL
    ]
