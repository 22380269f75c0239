"""A start from the weights of another run: fine-tuning."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from nmt.config import schema
from nmt.config.compose import flatten, load_config
from nmt.config.errors import UserError
from nmt.config.overrides import for_shell
from nmt.data.prepared import Prepared
from nmt.files import read_bytes
from nmt.model.load import load_model
from nmt.run import RunDirectory


class Start(NamedTuple):
    """What a run starts from."""

    weights: dict[str, Tensor]
    record: dict[str, Any]  # of the other run, for the manifest


def first_weights(config: schema.TrainConfig, prepared: Prepared) -> Start | None:
    """The weights of the best checkpoint of training.start_from; None if there is none given.

    Raises UserError if they do not fit the model, or its tokenizers these.
    """
    if config.training.start_from is None:
        return None
    run = RunDirectory.existing(config.training.start_from, "training.start_from")
    saved = load_config(run.config)
    refuse_other_tokenizers("training.start_from", run, saved.tokenizer.lowercase, config, prepared)
    path = run.checkpoints / "best.pt"
    try:
        model, checkpoint = load_model(config, prepared.tokenizers, path)
    except UserError:
        if path.is_file() and (others := differing(saved, config)):
            raise UserError(
                f"training.start_from={run.path}: its weights do not fit this model ({'; '.join(others)})"
            ) from None
        raise
    return Start(model.state_dict(), record_of(run, checkpoint))


def record_of(run: RunDirectory, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest keeps of another run: which one it is, the step and scores of its best checkpoint, its system."""
    kept = {"step": checkpoint["step"], "scores": checkpoint.get("scores", {})}
    return {"run": str(run.path), **kept, "system": run.system()}


def refuse_other_tokenizers(
    key: str, run: RunDirectory, lowercase: bool, config: schema.TrainConfig, prepared: Prepared
) -> None:
    """Raises UserError, naming the configuration's `key`, unless the run's tokenizers are those of the corpus."""
    names = ["tokenizer.model"] if (run.path / "tokenizer.model").is_file() else ["source.model", "target.model"]
    theirs = [run.path / names[0], run.path / names[-1]]
    same = [
        path.is_file() and read_bytes(path) == mine.model
        for path, mine in zip(theirs, prepared.tokenizers, strict=True)
    ]
    if all(same) and lowercase == config.tokenizer.lowercase:
        return
    models = zip(("source_model", "target_model"), dict.fromkeys(theirs), strict=False)
    remedy = ["tokenizer=file", *(for_shell(f"tokenizer.{name}", path) for name, path in models)]
    if lowercase:
        remedy.append("tokenizer.lowercase=true")
    raise UserError(
        f"{key}={run.path}: its weights know another tokenizer's pieces than this run's; give it the "
        f"same: {' '.join(remedy)}"
    )


def differing(saved: schema.TrainConfig, config: schema.TrainConfig) -> list[str]:
    """Values of the model that are others there, in words."""
    here, there = (
        dict(flatten(each.model_dump(mode="json", include=set(schema.Model.model_fields)))) for each in (config, saved)
    )
    return [
        f"{key} is {there.get(key)} there, {here.get(key)} here"
        for key in {**there, **here}
        if there.get(key) != here.get(key) and "dropout" not in key
    ]
