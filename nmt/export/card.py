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
    facts: Mapping[str, str],
    **values: object,
) -> str:
    """Fill in the template.

    manifest, results: the content of these two JSON files in the archive; `results` maps each split to its scores.
    facts: further rows of the table at the top. values: the other variables of the template: `pictures` (how many there
    are), `labelled` (whether they show tokens), `chosen` (whether the user chose their sentences) and `tested` (whether
    the test set is in the archive).
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
    signatures = {name: text for scores in results.values() for name, text in scores["signatures"].items()}
    return environment.get_template("card.md").render(
        config=config,
        version=manifest["starts"][0].get("versions", {}).get("nmt"),
        facts={**facts, **_facts(config, manifest)},
        results=results,
        signatures=signatures,
        metrics={name: METRICS[name] for name in signatures},
        run=for_shell("run", file_name),
        file_name=file_name,
        **values,
    )


def _facts(config: TrainConfig, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Describe the configuration, the corpus and the training, a row of the table for each."""
    data: Any = config.data
    start, record, training = manifest["starts"][0], manifest["data"], manifest.get("training")
    names = {"demo": "the demo corpus that comes with nmt", "hub": f"{getattr(data, 'id', '')} of the Hugging Face hub"}
    corpus = names.get(data.kind, "text files")
    if train := record.get("splits", {}).get("train"):
        source, target = train["tokens"]
        corpus += f": {train['kept']:,} sentence pairs, {source:,} and {target:,} tokens"
    both = {True: ", in both directions", "first": ", the first in both directions", False: ""}
    attention, preset = config.attention, start.get("choices", {}).get("attention")
    attended = [f"`attention={preset}`"] if preset else []
    if attention.kind != "none":
        parts = {name: getattr(attention, name).kind for name in ("score", "window", "normalizer", "alignment")}
        attended += [f"{key} `{value}`" for key, value in {**parts, "decoder.attend": config.decoder.attend}.items()]
    sizes, machine = record.get("vocabulary"), start.get("machine", {})
    trained = UNKNOWN
    if training:
        trained = f"{training['steps']:,} updates, {training['epochs']:g} epochs, {human_duration(training['seconds'])}"
        trained += f" on {machine.get('name', machine.get('device', 'an unknown machine'))}"
        trained += ", from the weights of another run" * ("start_from" in start)
        trained += ", distilled from other runs" * bool(start.get("teachers"))
    search = config.search.model_dump(exclude=set(SearchLimits.model_fields))
    return {
        "Languages": f"{data.source_lang} to {data.target_lang}",
        "Training corpus": corpus,
        "Encoder": _network(config.encoder) + both[config.encoder.bidirectional],
        "Decoder": _network(config.decoder),
        "Attention": ", ".join(attended) or "none",
        "Vocabulary": f"{sizes[0]:,} source and {sizes[1]:,} target pieces" if sizes else UNKNOWN,
        "Training": trained,
        "Search": " ".join(f"search.{key}={value}" for key, value in search.items()),
    }


def _network(network: Any) -> str:  # noqa: ANN401
    layers = f"{network.layers} layer{'s' * (network.layers > 1)}"
    return f"{network.cell.upper()}, {layers} of {network.hidden:,} units"
