"""What a run takes from other runs at its start: initial weights and teachers.

Shapes: V tokens of the new vocabulary, W tokens of the old vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.config import schema
from nmt.config.checks import flatten
from nmt.config.errors import UserError
from nmt.config.schema.model import Model
from nmt.config.schema.training import Distillation
from nmt.data.prepared_corpus import PreparedCorpus
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.model.checkpoints import BEST, load_model, new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.system.machine import Machine
from nmt.system.run import RunDirectory, load_config
from nmt.system.text_table import short

TABLES = {
    "source_embedding.weight": "source",
    "target_embedding.weight": "target",
    "output.weight": "target",
    "output.bias": "target",
}
"""Parameters with one row per token of a vocabulary, and the side that the vocabulary belongs to."""


class InitialWeights(NamedTuple):
    """The parameters that a run starts from, taken from another run."""

    weights: dict[str, Tensor]  # the model's state dict
    record: dict[str, Any]  # description of that run for the manifest, from `record_of`
    description: str  # description of that run for the log


class Teachers(NamedTuple):
    """The models that a distillation learns from."""

    models: list[Seq2Seq]
    records: list[dict[str, Any]]  # description of each teacher's run for the manifest, from `record_of`


def load_initial_weights(config: schema.TrainConfig, corpus: PreparedCorpus) -> InitialWeights | None:
    """Load the best checkpoint of training.start_from; return None if the configuration names no run.

    If that run has other tokenizers, its embeddings and output layer are converted to the new vocabulary. Raises
    UserError if its parameters do not fit the model.
    """
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
    weights, record = model.state_dict(), record_of(run, checkpoint)
    description = f"initial weights: step {record['step']} of {record['run']}"
    if not all(old.same_as(new) for old, new in zip(tokenizers, corpus.tokenizers, strict=True)):
        torch.manual_seed(config.seed)
        random = new_model(config, corpus.tokenizers).state_dict()
        weights, spelled = transfer_weights(weights, random, tokenizers, corpus.tokenizers)
        pieces = " and ".join(f"{count} {side} pieces" for side, count in spelled.items())
        description += f", with another tokenizer: {pieces} start from its vectors"
    return InitialWeights(weights, record, description)


def load_teachers(
    config: schema.TrainConfig, corpus: PreparedCorpus, machine: Machine, recorded: Sequence[Mapping[str, Any]] = ()
) -> Teachers:
    """Load the best checkpoints of objective.teachers; return no teachers if the objective is not distillation.

    recorded: the teachers' records from when this run began, empty if it begins now. Raises UserError if a teacher is
    missing, has other tokenizers, or has another best checkpoint than recorded. The path of a teacher's run may change.
    """
    teachers = Teachers([], [])
    for path in config.objective.teachers if isinstance(config.objective, Distillation) else []:
        run = RunDirectory.existing(path, "objective.teachers")
        saved = load_config(run.config)
        _refuse_other_tokenizers(run, saved.tokenizer.lowercase, corpus)
        model, checkpoint = load_model(saved, corpus.tokenizers, run.checkpoints / BEST)
        teachers.models.append(model.eval().to(machine.device))
        teachers.records.append(record_of(run, checkpoint))
    now, before = ([(one["step"], one["scores"]) for one in records] for records in (teachers.records, recorded))
    if recorded and now != before:
        began = ", ".join(f"step {record['step']} of {record['run']}" for record in recorded)
        raise UserError(f"objective.teachers: this run began with {began}; name those, or start a new run")
    return teachers


def record_of(run: RunDirectory, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Describe another run for the manifest: its path, step and scores of its best checkpoint, its system digest."""
    best = {"step": checkpoint["step"], "scores": checkpoint.get("scores", {})}
    return {"run": str(run.source), **best, "system": run.system_digest()}


def _refuse_other_tokenizers(run: RunDirectory, lowercase: bool, corpus: PreparedCorpus) -> None:
    tokenizers = Tokenizers.load(run.path, lowercase)
    if not all(old.same_as(new) for old, new in zip(tokenizers, corpus.tokenizers, strict=True)):
        raise UserError(
            f"objective.teachers={run.source}: was trained with another tokenizer than this run; use the same one "
            f"(tokenizer=file tokenizer.lowercase={short(lowercase)}), whose models are in {run.path}"
        )


def model_differences(saved: schema.TrainConfig, config: schema.TrainConfig) -> list[str]:
    """Describe the settings of the model, except dropout, in which the two configurations differ."""
    here, there = (
        dict(flatten(values.model_dump(mode="json", include=set(Model.model_fields)))) for values in (config, saved)
    )
    return [
        f"{key} is {there.get(key)} there, {here.get(key)} here"
        for key in {**there, **here}
        if there.get(key) != here.get(key) and "dropout" not in key
    ]


def transfer_weights(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], old_tokenizers: Tokenizers, new_tokenizers: Tokenizers
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Convert a state dict to new vocabularies: each parameter in `TABLES` from rows (W, ...) to rows (V, ...).

    old: the state dict for the old vocabularies; new: a state dict of random parameters for the new vocabularies. A new
    token's row is the mean of the rows of the old tokens that spell the new token (see `origins_of`), or if there are
    no such tokens, the row in `new`. Returns the converted state dict and, for each side, the number of new tokens
    whose row comes from old tokens.
    """
    sides = zip(Tokenizers._fields, new_tokenizers, old_tokenizers, strict=True)
    origins = {side: origins_of(after, before) for side, after, before in sides}
    weights = dict(old)
    for name, side in TABLES.items():
        if name in old:
            weights[name] = new[name].clone()
            for token, parts in origins[side].items():
                weights[name][token] = old[name][parts].mean(0)
    return weights, {side: len(tokens) for side, tokens in origins.items()}


def origins_of(new: Tokenizer, old: Tokenizer) -> dict[int, list[int]]:
    """Map each new token to the old tokens whose pieces, joined, spell its piece.

    A piece that is in both vocabularies is mapped to itself. Other pieces are lowercased first if the old tokenizer
    lowercases. New tokens without any matching old token are left out.
    """
    ids = {piece: token for token, piece in enumerate(old.pieces(range(old.vocab_size)))}
    longest = max(map(len, ids))
    origins: dict[int, list[int]] = {}
    for token, piece in enumerate(new.pieces(range(new.vocab_size))):
        if piece in ids:
            origins[token] = [ids[piece]]
        elif parts := _segment(piece.lower() if old.lowercase else piece, ids, longest):
            origins[token] = parts
    return origins


def _segment(piece: str, ids: Mapping[str, int], longest: int) -> list[int]:
    """Split a piece into tokens from left to right, each time into the longest one that matches. A character that
    matches no token becomes the tokens of its bytes, or nothing if the vocabulary has no bytes."""
    tokens: list[int] = []
    done = 0  # number of characters that `tokens` spell
    while done < len(piece):
        ends = range(min(len(piece), done + longest), done, -1)
        end = next((end for end in ends if piece[done:end] in ids), done + 1)
        parts = [piece[done:end]]
        if parts[0] not in ids:
            parts = [f"<0x{byte:02X}>" for byte in piece[done].encode("utf-8", "replace")]
        tokens += [ids[part] for part in parts if part in ids]
        done = end
    return tokens
