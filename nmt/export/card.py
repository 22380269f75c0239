"""The model card: README.md of an archive, in Markdown. It copies no text of the corpus."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nmt.config import schema
from nmt.config.errors import printable
from nmt.config.overrides import for_shell
from nmt.system.text_table import human_duration
from nmt.translate.translator import make_search

UNKNOWN = "not recorded"
FILES = {  # what is in each file, by the start of its name
    "checkpoints/": "the weights",
    "config": "all values of the training run; of paths only the last part",
    "manifest": "versions, corpus counts, training time",
    "results": "the scores, with signatures and settings",
    "tokenizer": "the SentencePiece model",
    "source": "the source's SentencePiece model",
    "target": "the target's SentencePiece model",
    "attention": "attention as a picture",
    "shortlist": "likely translations of each token, for `shortlist=auto`",
    "data/": "held-out text",
    "hypotheses/": "translations of it by this model",
    "alignments/": "alignments of both",
}


@dataclass(frozen=True)
class Card:
    """What a model card says."""

    config: schema.TrainConfig
    manifest: Mapping[str, Any]  # as packed
    results: Mapping[str, Mapping[str, Any]]  # scores by split
    checkpoint: str
    parameters: int
    weight_bytes: int
    license: str | None
    pictures: Sequence[bool]  # for each heatmap: does it show the sentence's tokens?
    given: bool  # were its sentences given on the command line?
    names: Sequence[str]  # of the files in the archive besides the card
    file_name: str


def card(model: Card) -> str:
    """The text of README.md."""
    data = model.config.data
    attention = model.config.attention.kind != "none"
    kind = "with" if attention else "without"
    parts = [
        f"# Translation from {data.source_lang} to {data.target_lang}",
        f"A recurrent encoder-decoder {kind} attention, trained with nmt{_version(model)}.",
        _table(("", ""), _facts(model)),
        "## Scores",
        _scores(model.results),
        *(["## Attention", _attention(model)] if attention else []),
        "## How to use it",
        _usage(model),
        "## What to expect",
        "The model knows text like that of its training corpus. A line of more than "
        f"{model.config.search.max_source_length:,} tokens is cut. The vocabulary holds words, or parts of words, of "
        "the training corpus.",
        "## Files",
        _table(("File", "Content"), [(f"`{name}`", _content(name)) for name in model.names]),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(model: Card) -> list[tuple[str, str]]:
    config, training = model.config, model.manifest.get("training", {})
    facts = [
        ("Licence", model.license or "not stated"),
        ("Languages", f"{config.data.source_lang} to {config.data.target_lang}"),
        ("Training corpus", _corpus(model)),
        ("Encoder", _network(config.encoder, config.encoder.bidirectional)),
        ("Decoder", _network(config.decoder, False)),
        ("Attention", _kind_of_attention(model)),
        ("Vocabulary", _vocabulary(model)),
        ("Size", f"{model.parameters:,} parameters, {model.weight_bytes / 1e6:,.1f} MB of weights"),
        ("Training", _training(training, (model.manifest.get("starts") or [{}])[0])),
        ("Checkpoint", model.checkpoint),
        ("Search", make_search(config.search).summary()),
    ]
    return facts


def _corpus(model: Card) -> str:
    data = model.config.data
    names = {"demo": "the demo corpus that comes with nmt", "files": "text files", "multilingual": "text files"}
    name = names[data.kind] if data.kind in names else f"{getattr(data, 'id', '')} of the Hugging Face hub"
    train = model.manifest.get("data", {}).get("splits", {}).get("train")
    if not train:
        return name
    source, target = train["tokens"]
    return f"{name}: {train['kept']:,} sentence pairs, {source:,} and {target:,} tokens"


def _network(network: Any, bidirectional: bool | str) -> str:  # noqa: ANN401
    layers = f"{network.layers} layer{'s' * (network.layers > 1)}"
    both = {True: ", in both directions", "first": ", the first in both directions"}.get(bidirectional, "")
    return f"{network.cell.upper()}, {layers} of {network.hidden:,} units{both}"


def _kind_of_attention(model: Card) -> str:
    attention = model.config.attention
    preset = ((model.manifest.get("starts") or [{}])[0]).get("choices", {}).get("attention")
    named = f"`attention={preset}`" if preset else ""
    if attention.kind == "none":
        return named or "none"
    parts = {
        "score": attention.score.kind,
        "window": attention.window.kind,
        "normalizer": attention.normalizer.kind,
        "alignment": attention.alignment.kind,
        "decoder.attend": model.config.decoder.attend,
    }
    text = ", ".join(f"{key} `{value}`" for key, value in parts.items())
    return f"{named}: {text}" if named else text


def _vocabulary(model: Card) -> str:
    sizes = model.manifest.get("data", {}).get("vocabulary")
    tokenizer = model.config.tokenizer
    kind = "" if tokenizer.kind == "file" else f", {tokenizer.kind}"
    return f"{sizes[0]:,} source and {sizes[1]:,} target pieces{kind}" if sizes else UNKNOWN


def _training(training: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    if not training:
        return UNKNOWN
    machine = start.get("machine", {})
    text = f"{training.get('steps', 0):,} updates, {training.get('epochs', 0):g} epochs, " + human_duration(
        training.get("seconds", 0)
    )
    if machine:
        text += f" on {machine.get('name', machine.get('device', ''))} in {machine.get('precision', '')}"
    if "start_from" in start:
        text += ", from the weights of another run"
    if start.get("teachers"):
        text += f", distilled from {len(start['teachers'])} other run{'s' * (len(start['teachers']) > 1)}"
    return text


def _scores(results: Mapping[str, Mapping[str, Any]]) -> str:
    if not results:
        return "This checkpoint was not evaluated."
    metrics = ("bleu", "chrf", "ter")
    aer = any("aer" in scores for scores in results.values())
    head = ("Split", "Sentences", "BLEU", "chrF", "TER", *(["AER"] if aer else []))
    rows = [
        (
            split,
            f"{scores['sentences']:,}",
            *(f"{scores[metric]:.2f}" for metric in metrics),
            *([f"{100 * scores['aer']:.1f} %" if "aer" in scores else ""] if aer else []),
        )
        for split, scores in results.items()
    ]
    signatures = {
        f"{name}: `{scores[key]}`"
        for scores in results.values()
        for name, key in (("BLEU", "signature"), ("chrF", "chrf_signature"), ("TER", "ter_signature"))
    }
    return "\n\n".join(
        [_table(head, rows), "sacreBLEU's signatures:", "\n".join(f"- {each}" for each in sorted(signatures))]
    )


def _attention(model: Card) -> str:
    if not model.pictures:
        return "There is no picture, because the run that was packed had no held-out text."
    where = "a sentence that was chosen for this card" if model.given else "a sentence of the validation set"
    text = f"Each row is a token that the model wrote, each column a token of {where}; </s> ends both."
    if not model.pictures[0]:
        text += " The tokens are numbered, because the text of the corpus is not part of this archive."
    pictures = [f"![Attention weights of a translation.](attention-{n}.png)" for n in range(1, len(model.pictures) + 1)]
    return "\n\n".join([text, *pictures])


def _usage(model: Card) -> str:
    run = for_shell("run", model.file_name)
    evaluate = f"nmt-evaluate {run} output=scores\n" if "data/test.source" in model.names else ""
    return (
        f"```bash\nnmt-translate {run} < input > output\n{evaluate}```\n\n"
        f'```python\nfrom nmt import Translator\n\ntranslator = Translator.load("{model.file_name}")\n'
        'print(translator.translate(["..."])[0].text)\n```\n\n'
        "`training.start_from` and `objective.teachers` of `nmt-train` take the archive, too."
    )


def _content(name: str) -> str:
    return next(text for start, text in FILES.items() if name.startswith(start))


def _version(model: Card) -> str:
    version = ((model.manifest.get("starts") or [{}])[0]).get("versions", {}).get("nmt")
    return f" {version}" if version else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(printable(text).split()).replace("|", "\\|")
