"""The model card: README.md of an archive, from the template `card.md`. It contains no text of the corpus."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from nmt.config.errors import for_shell, printable
from nmt.config.schema import TrainConfig
from nmt.config.schema.training import SearchLimits
from nmt.evaluate.metrics import METRICS
from nmt.system.text_table import human_duration

UNKNOWN = "not recorded"


def card(
    config: TrainConfig,
    manifest: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
    file_name: str,
    *,
    parameters: int,
    weight_bytes: int,
    half: bool,
    license: str | None,
    checkpoint: str,
    **values: object,
) -> str:
    """Fill in the template.

    manifest, results: the content of these two JSON files in the archive; `results` maps each split to its scores.
    half: the weights are rounded to 16 bits. values: the other variables of the template: `pictures`, `chosen` (whether
    the user chose the sentences of the pictures) and `names` (the names of all files in the archive).
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # this is Markdown
    )
    environment.filters["cell"] = lambda text: " ".join(printable(text).split()).replace("|", "\\|")
    data, start = config.data, (manifest.get("starts") or [{}])[0]
    search = config.search.model_dump(exclude=set(SearchLimits.model_fields))
    facts = {
        "Licence": license or "not stated",
        "Languages": f"{data.source_lang} to {data.target_lang}",
        "Training corpus": _corpus(data, manifest),
        "Encoder": _network(config.encoder, config.encoder.bidirectional),
        "Decoder": _network(config.decoder, False),
        "Attention": _attention(config, start.get("choices", {}).get("attention")),
        "Vocabulary": _vocabulary(config, manifest),
        "Size": f"{parameters:,} parameters, {weight_bytes / 1e6:,.1f} MB of weights",
        "Training": _training(manifest.get("training", {}), start),
        "Checkpoint": checkpoint + (half * "; weights rounded to fp16, scores measured before this"),
        "Search": " ".join(f"search.{key}={value}" for key, value in search.items()),
    }
    signatures = {name: text for scores in results.values() for name, text in scores["signatures"].items()}
    return environment.get_template("card.md").render(
        config=config,
        attends=config.attention.kind != "none",
        version=start.get("versions", {}).get("nmt"),
        facts=facts,
        results=results,
        signatures=signatures,
        metrics={name: METRICS[name] for name in signatures},
        run=for_shell("run", file_name),
        file_name=file_name,
        **values,
    )


def _corpus(data: Any, manifest: Mapping[str, Any]) -> str:  # noqa: ANN401
    names = {"demo": "the demo corpus that comes with nmt", "files": "text files", "multilingual": "text files"}
    name = names[data.kind] if data.kind in names else f"{getattr(data, 'id', '')} of the Hugging Face hub"
    train = manifest.get("data", {}).get("splits", {}).get("train")
    if not train:
        return name
    source, target = train["tokens"]
    return f"{name}: {train['kept']:,} sentence pairs, {source:,} and {target:,} tokens"


def _network(network: Any, bidirectional: bool | str) -> str:  # noqa: ANN401
    layers = f"{network.layers} layer{'s' * (network.layers > 1)}"
    both = {True: ", in both directions", "first": ", the first in both directions"}.get(bidirectional, "")
    return f"{network.cell.upper()}, {layers} of {network.hidden:,} units{both}"


def _attention(config: TrainConfig, preset: str | None) -> str:
    attention = config.attention
    name = f"`attention={preset}`" if preset else ""
    if attention.kind == "none":
        return name or "none"
    parts = {
        "score": attention.score.kind,
        "window": attention.window.kind,
        "normalizer": attention.normalizer.kind,
        "alignment": attention.alignment.kind,
        "decoder.attend": config.decoder.attend,
    }
    text = ", ".join(f"{key} `{value}`" for key, value in parts.items())
    return f"{name}: {text}" if name else text


def _vocabulary(config: TrainConfig, manifest: Mapping[str, Any]) -> str:
    sizes = manifest.get("data", {}).get("vocabulary")
    kind = "" if config.tokenizer.kind == "file" else f", {config.tokenizer.kind}"
    return f"{sizes[0]:,} source and {sizes[1]:,} target pieces{kind}" if sizes else UNKNOWN


def _training(training: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    if not training:
        return UNKNOWN
    duration = human_duration(training.get("seconds", 0))
    text = f"{training.get('steps', 0):,} updates, {training.get('epochs', 0):g} epochs, {duration}"
    if machine := start.get("machine", {}):
        text += f" on {machine.get('name', machine.get('device', ''))} in {machine.get('precision', '')}"
    if "start_from" in start:
        text += ", from the weights of another run"
    if teachers := start.get("teachers"):
        text += f", distilled from {len(teachers)} other run{'s' * (len(teachers) > 1)}"
    return text
