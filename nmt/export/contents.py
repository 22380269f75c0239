"""Chooses which parts of a run go into an archive: nothing that is useful only on this machine, and no text of the
corpus unless the user asks for it. Also writes the archive's README.md, the model card, from the template `card.md`.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor

from nmt.config.errors import UserError, for_shell, printable
from nmt.config.schema import TrainConfig
from nmt.config.schema.commands import PATH_KEYS, with_paths
from nmt.config.schema.training import SearchLimits
from nmt.data.tokenizer import TOKENIZER_FILES
from nmt.evaluate.metrics import METRICS
from nmt.model.checkpoints import LAST, MAX_FILE_BYTES, read_checkpoint, to_safetensors
from nmt.system.files import CARD, CONFIG, MAX_PICTURES, MAX_TEXT, WEIGHTS, read_bytes, to_json
from nmt.system.run import RunDirectory, load_config, load_values, read_json
from nmt.system.text_table import human_duration
from nmt.translate.heatmap import draw_alignment, save
from nmt.translate.shortlist import MAX_BYTES, SHORTLIST
from nmt.translate.translator import Translator

SPLITS = ("validation", "test")
# Keys that an archive keeps: of `data` in the manifest, and of the record of a start.
OF_DATA = ("content", "fingerprint", "languages", "lowercase", "vocabulary", "splits")
OF_START = ("overrides", "choices", "versions", "git", "machine", "start_from", "teachers")
CACHE = "~/.cache/nmt"  # data.cache_dir in an archive
UNKNOWN = "not recorded"  # in the model card


def contents(
    run: RunDirectory,
    file_name: str,
    *,
    checkpoint: str = "best",
    license: str | None = None,
    sentences: Sequence[str] = (),
    held_out: bool = False,
    half: bool = False,
) -> dict[str, bytes]:
    """Collect the files of an archive called `file_name`: the name of each file and its bytes.

    sentences: drawn as heatmaps. If there are none, a sentence of the validation set is drawn, with numbers in place of
    its tokens unless the corpus is the demo corpus or `held_out` packs the held-out text. half: round the parameters to
    16 bits. Raises UserError if the run is damaged or lacks a part that is to be packed.
    """
    config = load_config(run.config)
    translator = Translator.load(run.source, checkpoint=checkpoint, device="cpu", precision="fp32")
    # The tokens of validation sentences stay private, unless their text is public or packed anyway.
    labelled = bool(sentences) or held_out or config.data.kind == "demo"
    pictures = _pictures(translator, run, sentences, labelled)
    weights, step = _read_weights(run, checkpoint, half)
    suffix = "" if checkpoint == "best" else f".checkpoint-{checkpoint}"  # in the names of results and translations
    recorded = read_json(run.results)
    results = {split: recorded[f"{split}{suffix}"] for split in SPLITS if f"{split}{suffix}" in recorded}
    parameters = sum(parameter.numel() for parameter in translator.model.parameters())
    values = yaml.safe_dump(shared_config(load_values(run.config)), sort_keys=False, allow_unicode=True)
    facts = {
        "Licence": license or "not stated",
        "Size": f"{parameters:,} parameters, {len(weights) / 1e6:,.1f} MB of weights",
        "Checkpoint": f"{checkpoint} (update {step:,})"
        + half * "; weights rounded to fp16, scores measured before this",
    }
    manifest = shared_manifest(run.read_manifest()) | {"parameters": parameters}
    files = {CONFIG: values.encode()}
    for name, record in (("manifest.json", manifest), ("results.json", results)):
        files[name] = f"{to_json(record, indent=2)}\n".encode()
    files |= {name: read_bytes(run.path / name) for name in TOKENIZER_FILES if (run.path / name).is_file()}
    files |= {f"attention-{number}.png": picture for number, picture in enumerate(pictures, 1)}
    if (run.path / SHORTLIST).is_file():
        files[SHORTLIST] = read_bytes(run.path / SHORTLIST, MAX_BYTES)
    if held_out:
        files |= _held_out(run, suffix)
    files[WEIGHTS] = weights
    shown = {"pictures": len(pictures), "labelled": labelled, "chosen": bool(sentences)}
    shown["tested"] = "data/test.source" in files
    readme = card(config, manifest, results, file_name, facts=facts, **shown)
    return {CARD: readme.encode(), **files}


def shared_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a run's configuration, with only the last part of each path: loading the model needs no paths."""
    shared: dict[str, Any] = with_paths(TrainConfig, values, lambda path: Path(path).name or ".")
    shared["data"]["cache_dir"] = CACHE
    return shared


def shared_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Copy from a manifest how the model was trained, without paths, host names and warnings. Of a resumed run, only
    the first start is kept, with the machine of the last."""
    starts = manifest.get("starts") or [{}]
    start = deepcopy({**starts[0], "machine": starts[-1].get("machine", {})})
    start = {key: start[key] for key in OF_START if start.get(key) is not None}
    kept = []
    for override in start.get("overrides", []):
        key, _, value = override.lstrip("+~").partition("=")
        # The value {...} is a whole section, which may contain paths.
        if key not in PATH_KEYS | {"run", "data.corpora"} and not key.startswith("hydra") and not value.startswith("{"):
            kept.append(override)
    start["overrides"] = kept
    for record in [start.get("start_from", {}), *start.get("teachers", [])]:
        if "run" in record:
            record["run"] = Path(str(record["run"])).name
    shared = {key: manifest[key] for key in ("status", "seed", "parameters", "training") if key in manifest}
    shared["data"] = {key: value for key, value in manifest.get("data", {}).items() if key in OF_DATA}
    return {**shared, "starts": [start]}


def _read_weights(run: RunDirectory, checkpoint: str, half: bool) -> tuple[bytes, int]:
    """Return the bytes of a safetensors file with the checkpoint's parameters, with `half` rounded to 16 bits, and the
    number of the checkpoint's update."""
    path = run.path / WEIGHTS if checkpoint == "best" else run.checkpoints / LAST
    state = read_checkpoint(path)
    step = int(state["step"])
    if checkpoint == "best" and not half:
        return read_bytes(path, MAX_FILE_BYTES), step
    model = _round_to_half(state["model"]) if half else state["model"]
    return to_safetensors({"model": model, "step": step, "scores": {}}), step


def _round_to_half(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round floating-point parameters to 16 bits; tied parameters stay one tensor."""
    rounded = {weight.data_ptr(): weight.half() for weight in model.values() if weight.is_floating_point()}
    return {name: rounded.get(weight.data_ptr(), weight).view(weight.shape) for name, weight in model.items()}


def _pictures(translator: Translator, run: RunDirectory, sentences: Sequence[str], labelled: bool) -> list[bytes]:
    """Draw the attention in translations of the sentences as PNG files. If there are none, draws the non-blank
    validation sentence of median length."""
    if not translator.model.attends:
        if sentences:
            raise UserError(f"sentence={','.join(sentences)}: the run has no attention to draw")
        return []
    if len(sentences) > MAX_PICTURES:
        raise UserError(f"sentence: {len(sentences)} sentences; an archive has at most {MAX_PICTURES} pictures")
    if not sentences:
        with suppress(UserError):  # there is no validation set
            ordered = sorted(filter(str.strip, run.held_out("validation")[0]), key=lambda line: len(line.split()))
            sentences = ordered[len(ordered) // 2 :][:1]
    pictures = []
    for sentence, translation in zip(sentences, translator.translate(sentences), strict=True):
        if translation.alignment is None:
            raise UserError(f"sentence={sentence}: has no translation whose attention could be drawn")
        source, target = translation.source_tokens, translation.tokens
        if not labelled:
            source, target = ([str(number) for number in range(1, len(side) + 1)] for side in (source, target))
        file = io.BytesIO()
        save(draw_alignment(translation.alignment, source, target), file)
        pictures.append(file.getvalue())
    return pictures


def _held_out(run: RunDirectory, suffix: str) -> dict[str, bytes]:
    """Read the text of the held-out splits, and the run's translations and alignments of it."""
    texts = [f"data/{split}.{kind}" for split in SPLITS for kind in ("source", "target", "alignments")]
    files = {name: run.path / name for name in texts}
    for split in SPLITS:
        files[f"hypotheses/{split}.txt"] = run.hypotheses / f"{split}{suffix}.txt"
        for kind in ("references.pharaoh", "translations.pharaoh", "words.jsonl"):
            files[f"alignments/{split}.{kind}"] = run.alignments / f"{split}{suffix}.{kind}"
    packed = {name: read_bytes(path, MAX_TEXT) for name, path in files.items() if path.is_file()}
    if not packed:
        raise UserError(f"held_out=true: {run.source} has no held-out text")
    return packed


# The model card


def card(
    config: TrainConfig,
    manifest: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
    file_name: str,
    *,
    facts: Mapping[str, str],
    **values: object,
) -> str:
    """Fill in the template of the model card.

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
