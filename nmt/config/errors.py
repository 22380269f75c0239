"""Errors that a user can cause, and how they are worded: one line with a suggestion."""

import difflib
import re
from collections.abc import Iterable

MAX_VALUE = 100  # characters of a value in a message
MAX_SUGGESTIONS = 4
# Names of keys in other toolkits, and abbreviations.
OTHER_NAMES = {
    "data.source_lang": "source src src_lang",
    "data.target_lang": "target tgt tgt_lang",
    "data.validation": "dev val valid",
    "decoder.cell": "rnn_type",
    "decoder.hidden": "hidden_dim hidden_size hidden_units rnn_size",
    "decoder.layers": "n_layers num_layers",
    "device": "cuda gpu gpus",
    "embedding.dim": "emb_dim emb_size embedding_dim embedding_size word_vec_size",
    "encoder.cell": "rnn_type",
    "encoder.hidden": "hidden_dim hidden_size hidden_units rnn_size",
    "encoder.layers": "n_layers num_layers",
    "hydra.run.dir": "out_dir output_dir save_dir",
    "optimizer": "optim",
    "optimizer.lr": "learning_rate",
    "output": "out_dir output_dir save_dir",
    "precision": "amp bf16 fp16",
    "schedule.warmup_steps": "warmup",
    "search.alpha": "lenpen",
    "search.beam_size": "beam beam_width",
    "tokenizer.vocab_size": "vocab",
    "training.batch_sentences": "batch_size batchsize",
    "training.max_epochs": "epochs n_epochs num_epochs",
    "training.max_grad_norm": "clip clip_norm grad_clip gradient_clip",
    "training.max_steps": "num_steps steps train_steps",
    "training.scheduled_sampling": "teacher_forcing",
}
# Keys and choices of earlier versions, and what to do without them.
REMOVED = {
    "finding": "the verdicts on papers' findings were removed; leave it out, the comparison has scores and tests",
    "format": "the export to ONNX was removed; leave it out, nmt-export writes an archive",
    "objective=minimum_risk": "minimum risk training was removed; use likelihood, or objective=distillation",
    "logger=aim": "Aim was removed; use tensorboard, wandb or mlflow",
    "tracking.aim_repo": "Aim was removed; leave it out",
}
# Names of values in other toolkits.
OTHER_VALUES = {"gpu": "cuda", "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # surrogates stand for bytes that are not UTF-8


class UserError(ValueError):
    """A mistake in the input or the configuration: printed as one line without a traceback; exit status 2."""


def removed(key: str, value: object = None) -> str | None:
    """Return the message for a key, or for the choice of a value for it, that REMOVED holds; None for all others."""
    names = (key, f"{key}={format_value(value)}")
    return next((f"{name}: {REMOVED[name]}" for name in names if name in REMOVED), None)


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the allowed word that means the same or is closest, or an empty string."""
    candidates = [candidate for candidate in allowed if candidate != word]
    synonyms = {OTHER_VALUES.get(word), *map(_last_part, _keys_named(word))}
    same = [candidate for candidate in candidates if candidate in synonyms]
    return _did_you_mean(same or difflib.get_close_matches(word[:MAX_VALUE], candidates, n=1, cutoff=0.6))


def nearest_key(key: str, known: Iterable[str]) -> str:
    """The same for a key: those with the same last part or meaning, in any section; else the closest key, else those
    with the closest last part."""
    candidates = [candidate for candidate in known if candidate != key]
    key = key[:MAX_VALUE].lower()
    synonyms = _keys_named(_last_part(key))
    same = [candidate for candidate in candidates if candidate in synonyms or _last_part(candidate) == _last_part(key)]
    close = difflib.get_close_matches(key, same if same or synonyms else candidates, n=1, cutoff=0.6)
    if same and ("." not in key or not close):
        close = same
    elif not close and not synonyms:
        ends = difflib.get_close_matches(_last_part(key), {*map(_last_part, candidates)}, n=1, cutoff=0.7)
        close = [candidate for candidate in candidates if _last_part(candidate) in ends]
    depth = min((candidate.count(".") for candidate in close), default=0)
    return _did_you_mean([candidate for candidate in close if candidate.count(".") == depth])


def _keys_named(name: str) -> list[str]:
    """The keys that other toolkits give this name."""
    return [key for key, names in OTHER_NAMES.items() if name in names.split()]


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _did_you_mean(words: list[str]) -> str:
    named = " or ".join(f"'{word}'" for word in words)
    return f"; did you mean {named}?" if 0 < len(words) <= MAX_SUGGESTIONS else ""


def format_value(value: object, longest: int = MAX_VALUE) -> str:
    """The value as a user would write it, in one printable line; a long one is cut in the middle."""
    if value is None:
        return "null"
    try:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:  # Python does not format integers of more than 4300 digits
        return "an integer of thousands of digits"
    if len(text) > longest:
        half = longest // 2 - 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """Escape control characters, which a terminal would interpret, and lone surrogates, which UTF-8 cannot encode."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
