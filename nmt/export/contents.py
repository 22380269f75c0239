"""Chooses which parts of a run go into an archive: nothing that is of use only on this machine, and no text of the
corpus unless the user asks for it."""

import io
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.config.schema.base import with_paths
from nmt.config.schema.commands import PATH_KEYS
from nmt.data.tokenizer import TOKENIZER_FILES
from nmt.export.card import card
from nmt.model.checkpoints import LAST, MAX_FILE_BYTES, read_checkpoint, to_safetensors
from nmt.system.files import CARD, CONFIG, MAX_PICTURES, MAX_TEXT, WEIGHTS, read_bytes, to_json
from nmt.system.run import RunDirectory, load_config, load_values, read_json
from nmt.translate.heatmap import draw_alignment, save
from nmt.translate.shortlist import MAX_BYTES, SHORTLIST
from nmt.translate.translation import Translation
from nmt.translate.translator import Translator

SPLITS = ("validation", "test")
# Keys that an archive keeps: of `data` in the manifest, and of the record of a start.
OF_DATA = ("content", "fingerprint", "languages", "lowercase", "vocabulary", "splits")
OF_START = ("overrides", "choices", "versions", "git", "machine", "start_from", "teachers")
CACHE = "~/.cache/nmt"  # data.cache_dir in an archive


class Picture(NamedTuple):
    """A heatmap and what it shows."""

    png: bytes
    labelled: bool  # whether the axes show tokens; otherwise they show numbers


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
    pictures = _pictures(translator, run, config, sentences, held_out)
    weights, step = _read_weights(run, checkpoint, half)
    suffix = "" if checkpoint == "best" else f".checkpoint-{checkpoint}"  # in the names of results and translations
    recorded = read_json(run.results)
    results = {split: recorded[f"{split}{suffix}"] for split in SPLITS if f"{split}{suffix}" in recorded}
    parameters = sum(parameter.numel() for parameter in translator.model.parameters())
    values = yaml.safe_dump(shared_config(load_values(run.config)), sort_keys=False, allow_unicode=True)
    try:
        manifest = shared_manifest(run.read_manifest()) | {"parameters": parameters}
        files = {CONFIG: values.encode()}
        for name, record in (("manifest.json", manifest), ("results.json", results)):
            files[name] = f"{to_json(record, indent=2)}\n".encode()
        files |= {name: read_bytes(run.path / name) for name in TOKENIZER_FILES if (run.path / name).is_file()}
        files |= {f"attention-{number}.png": picture.png for number, picture in enumerate(pictures, 1)}
        if (run.path / SHORTLIST).is_file():
            files[SHORTLIST] = read_bytes(run.path / SHORTLIST, MAX_BYTES)
        if held_out:
            files |= _held_out(run, suffix)
        files[WEIGHTS] = weights
        readme = card(
            config,
            manifest,
            results,
            file_name,
            parameters=parameters,
            weight_bytes=len(weights),
            half=half,
            license=license,
            checkpoint=f"{checkpoint} (update {step:,})",
            pictures=pictures,
            chosen=bool(sentences),
            names=list(files),
        )
    except UserError:
        raise
    except (ArithmeticError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{run.source}: a file of this run is damaged ({type(error).__name__}: {error})") from None
    return {CARD: readme.encode(), **files}


def shared_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a run's configuration, with only the last part of each path: loading the model needs no paths."""
    shared: dict[str, Any] = with_paths(TrainConfig, values, lambda path: Path(path).name or ".")
    shared["data"]["cache_dir"] = CACHE
    return shared


def shared_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Copy from a manifest how the model was trained, without paths, host names and warnings.

    Of several starts of the run, only the first is kept, with the machine of the last.
    """
    starts = manifest.get("starts") or [{}]
    start = deepcopy({**starts[0], "machine": starts[-1].get("machine", {})})
    start = {key: start[key] for key in OF_START if start.get(key) is not None}
    start["overrides"] = [override for override in start.get("overrides", []) if not _names_a_place(override)]
    for record in [start.get("start_from", {}), *start.get("teachers", [])]:
        if "run" in record:
            record["run"] = Path(str(record["run"])).name
    shared = {key: manifest[key] for key in ("status", "seed", "parameters", "training") if key in manifest}
    shared["data"] = {key: value for key, value in manifest.get("data", {}).items() if key in OF_DATA}
    return {**shared, "starts": [start]}


def _names_a_place(override: str) -> bool:
    key, _, value = override.lstrip("+~").partition("=")
    if key.startswith("hydra") or value.startswith("{"):  # a whole section may contain paths
        return True
    return key in PATH_KEYS | {"run", "data.corpora"}


def _read_weights(run: RunDirectory, checkpoint: str, half: bool) -> tuple[bytes, int]:
    """Return the bytes of a safetensors file with the checkpoint's parameters, and the checkpoint's update number."""
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


def _pictures(
    translator: Translator,
    run: RunDirectory,
    config: TrainConfig,
    sentences: Sequence[str],
    held_out: bool,
) -> list[Picture]:
    if not translator.model.attends:
        if sentences:
            raise UserError(f"sentence={','.join(sentences)}: the run has no attention to draw")
        return []
    if len(sentences) > MAX_PICTURES:
        raise UserError(f"sentence: {len(sentences)} sentences; an archive has at most {MAX_PICTURES} pictures")
    labelled = bool(sentences) or held_out or config.data.kind == "demo"
    shown = sentences or _typical(run)
    drawn = zip(shown, translator.translate(shown), strict=True)
    return [Picture(_png(translation, sentence, labelled), labelled) for sentence, translation in drawn]


def _typical(run: RunDirectory) -> list[str]:
    """Return a list of one sentence, the non-blank validation sentence of median length; [] if there is none."""
    try:
        sources, _, _ = run.held_out("validation")
    except UserError:
        return []
    ordered = sorted((source for source in sources if source.strip()), key=lambda source: len(source.split()))
    return ordered[len(ordered) // 2 :][:1]


def _png(translation: Translation, sentence: str, labelled: bool) -> bytes:
    weights, source, target = translation.alignment, translation.source_tokens, translation.tokens
    if weights is None:
        raise UserError(f"sentence={sentence}: has no translation whose attention could be drawn")
    if not labelled:
        source, target = ([str(number) for number in range(1, len(side) + 1)] for side in (source, target))
    file = io.BytesIO()
    save(draw_alignment(weights, source, target), file)
    return file.getvalue()


def _held_out(run: RunDirectory, suffix: str) -> dict[str, bytes]:
    """Read the text of the held-out splits, and the run's translations and alignments of it."""
    paths = {
        f"{folder}/{split}{ending}": run.path / folder / f"{split}{'' if folder == 'data' else suffix}{ending}"
        for split in SPLITS
        for folder, endings in {
            "data": (".source", ".target", ".alignments"),
            "hypotheses": (".txt",),
            "alignments": (".references.pharaoh", ".translations.pharaoh", ".words.jsonl"),
        }.items()
        for ending in endings
    }
    files = {name: read_bytes(path, MAX_TEXT) for name, path in paths.items() if path.is_file()}
    if not files:
        raise UserError(f"held_out=true: {run.source} has no held-out text")
    return files
