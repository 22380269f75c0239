"""Writes and reads checkpoint files, and loads the models of runs from them.

The parameters of the best validation are stored as a safetensors file, the full state of training as a file in torch's
format. Loading executes no code from either file, and allocates memory only in proportion to the file's size.
"""

import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizers
from nmt.model.build import build_model, build_unfilled
from nmt.model.seq2seq import Ensemble, Seq2Seq
from nmt.system.files import read_bytes, reraise_if_system_error, write_atomically
from nmt.system.machine import is_out_of_memory
from nmt.system.run import RunDirectory

BEST, LAST = "best.safetensors", "last.pt"  # parameters of the best validation; training state to resume from
METADATA = "nmt"  # the key under which a safetensors file holds all values that are not tensors, as JSON
MAX_METADATA = 2**20  # limit on the header of a safetensors file, in bytes
MAX_FILE_BYTES = 2**36  # limit on a safetensors file, in bytes
FILES = {"best": BEST, "last": LAST}
UNFIT = "is corrupt, or the checkpoint of another model"


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically, in the format of the suffix. A .safetensors file takes {"model": parameters} and
    further values that JSON can hold, a .pt file any state."""
    if path.suffix == Path(BEST).suffix:
        write_atomically(path, to_safetensors(state))
    else:
        write_atomically(path, lambda file: torch.save(state, file))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raises OSError if the system cannot read the file, ValueError if its content is damaged."""
    try:
        state = _from_safetensors(path) if path.suffix == Path(BEST).suffix else _from_torch(path)
    except Exception as error:  # a damaged file can raise nearly anything
        reraise_if_system_error(error)
        if is_out_of_memory(error):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from None
        raise ValueError(f"not a checkpoint ({error})") from None
    if type(state) is not dict:
        raise ValueError("not a checkpoint (no dictionary)")
    return state


def to_safetensors(state: Mapping[str, Any]) -> bytes:
    """Encode a checkpoint as a safetensors file. Tied parameters are stored once, and the metadata names their aliases.
    A digest in the metadata shows flipped bits."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    for name, weight in state["model"].items():
        owner = first.setdefault((weight.data_ptr(), weight.shape), name)
        if owner == name:
            tensors[name] = weight.detach().cpu().contiguous()
        else:
            aliases[name] = owner
    values = {key: value for key, value in state.items() if key != "model"} | {"aliases": aliases}
    text = json.dumps(values, sort_keys=True)
    return _with_sorted_header(save_safetensors(tensors, {METADATA: text, "digest": _digest(text, tensors)}))


def _with_sorted_header(content: bytes) -> bytes:
    """Sort the header of a safetensors file, so that equal values give equal bytes. The library writes the metadata in
    the order of a hash table, which is random."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:start]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # as the library does, so that tensors are aligned
    return len(header).to_bytes(8, "little") + header + content[start:]


def _from_safetensors(path: Path) -> dict[str, Any]:
    content = read_bytes(path, MAX_FILE_BYTES)
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + min(length, MAX_METADATA)])["__metadata__"]
    tensors = load_safetensors(content)
    if metadata["digest"] != _digest(metadata[METADATA], tensors):
        raise ValueError("the digest differs")
    values = json.loads(metadata[METADATA])
    aliases = {name: tensors[owner] for name, owner in values.pop("aliases").items()}
    return {"model": tensors | aliases, **values}


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def _from_torch(path: Path) -> Any:  # noqa: ANN401
    """Read a file of torch.save, unless it is damaged or would allocate more memory than its size."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        # A few compressed bytes could become gigabytes, and records could overlap.
        packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        if packed or sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("compressed or overlapping records")
        if min(record.header_offset for record in records):
            raise ValueError("data before the archive")
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} differs")
        if any(b"bytearray" in archive.read(record) for record in records if record.filename.endswith(".pkl")):
            raise ValueError("a bytearray")  # torch.load would allocate whatever size the file states for it
    return torch.load(path, map_location="cpu", weights_only=True)


def new_model(config: schema.TrainConfig, tokenizers: Tokenizers) -> Seq2Seq:
    """Build a model for these vocabularies, with random parameters."""
    return build_model(config, *_sizes(tokenizers))


def _sizes(tokenizers: Tokenizers) -> tuple[int, int, tuple[int, int]]:
    """Return the arguments of `build_model` that follow from the tokenizers."""
    source, target = tokenizers
    return source.vocab_size, target.vocab_size, (source.pad, target.pad)


def load_weights(model: Seq2Seq, path: Path) -> None:
    """Fill a model from a checkpoint. Raises UserError if the checkpoint is missing or damaged or does not fit the
    model, OSError if the system cannot read it."""
    checkpoint = _read(path)
    _check_fit(model, checkpoint, path)
    model.load_state_dict(checkpoint["model"])


def load_model(config: schema.TrainConfig, tokenizers: Tokenizers, path: Path) -> tuple[Seq2Seq, dict[str, Any]]:
    """Load a model with the parameters of a checkpoint, and return model and checkpoint.

    The shapes are compared before the model is allocated, so that a configuration cannot ask for more memory than the
    checkpoint has. Raises UserError if the checkpoint is missing or damaged or does not fit the configuration, OSError
    if the system cannot read it.
    """
    checkpoint, sizes = _read(path), _sizes(tokenizers)
    weights = checkpoint.get("model")
    if not isinstance(weights, dict) or max(config.encoder.layers, config.decoder.layers) > len(weights):
        raise UserError(f"{path}: {UNFIT}")
    with torch.device("meta"):
        outline = build_unfilled(config, *sizes)
    _check_fit(outline, checkpoint, path)
    model = build_unfilled(config, *sizes)
    model.load_state_dict(weights)
    loaded = model.state_dict()
    if not all(torch.equal(loaded[name], weight.to(loaded[name].dtype)) for name, weight in weights.items()):
        raise UserError(f"{path}: {UNFIT}")  # the model ties tables that differ in the checkpoint
    return model, checkpoint


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raises UserError if it is missing or damaged."""
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; a run has one from its first validation on")
    try:
        return read_checkpoint(path)
    except ValueError:
        raise UserError(f"{path}: {UNFIT}") from None


def _check_fit(model: Seq2Seq, checkpoint: dict[str, Any], path: Path) -> None:
    """Raise UserError unless a checkpoint has finite parameters of the model's form, a step, and only numbers as scores
    if it has scores."""
    weights, scores = checkpoint.get("model", {}), checkpoint.get("scores", {})  # last.pt has no scores
    are_numbers = isinstance(scores, dict) and all(isinstance(score, float | int) for score in scores.values())
    if not same_form(weights, model.state_dict()) or type(checkpoint.get("step")) is not int or not are_numbers:
        raise UserError(f"{path}: {UNFIT}")
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise UserError(f"{path}: has weights that are infinite or not a number; take another checkpoint")


def same_form(weights: Any, own: dict[str, Tensor]) -> bool:  # noqa: ANN401
    """Return whether `weights` have the names, shapes and types of a model's parameters `own`. The type float16
    always fits."""
    if not isinstance(weights, dict) or weights.keys() != own.keys():
        return False
    return all(
        isinstance(weight, Tensor)
        and weight.shape == own[name].shape
        and weight.dtype in {own[name].dtype, torch.float16}
        for name, weight in weights.items()
    )


def load_runs(
    runs: Sequence[RunDirectory], configs: Sequence[schema.TrainConfig], checkpoint: str
) -> tuple[Seq2Seq | Ensemble, Tokenizers]:
    """Load the model of one run, or the ensemble of several, from their "best" or "last" checkpoints.

    Raises UserError if the runs have different tokenizers, if "last" is asked of an archive, which has only "best", or
    if a tokenizer or checkpoint cannot be loaded.
    """
    for run in runs:
        if run.is_archive and checkpoint != "best":
            raise UserError(
                f"checkpoint={checkpoint}: {run.source} is an archive, which has one checkpoint; leave it out"
            )
    pairs = list(zip(runs, configs, strict=True))
    first, *others = [Tokenizers.load(run.path, config.tokenizer.lowercase) for run, config in pairs]
    for run, tokenizers in zip(runs[1:], others, strict=True):
        for side, own, other in zip(Tokenizers._fields, first, tokenizers, strict=True):
            if not own.same_as(other):
                raise UserError(
                    f"run=[{runs[0].source},{run.source}]: the runs have different {side} tokenizers; an ensemble "
                    "needs runs of the same corpus and tokenizer"
                )
    models = [load_model(config, first, run.checkpoints / FILES[checkpoint])[0] for run, config in pairs]
    return models[0] if len(models) == 1 else Ensemble(models), first
