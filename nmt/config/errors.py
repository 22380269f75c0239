"""One-line errors with a suggestion for the user, and the syntax of overrides such as "optimizer.lr=0.1"."""

import difflib
import os
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_VALUE = 100  # characters of a value shown in a message; a longer value is cut
MAX_SUGGESTIONS = 4  # if more words match, the message suggests none
RECURRENT = [
    f"{side}.{key}"
    for side in ("encoder", "decoder")
    for key in ("recurrent_dropout", "zoneout", "weight_drop", "layer_norm", "transition_depth")
]
LANGUAGES, DIVERSE = ("source_lang", "target_lang"), ("search.groups", "search.diversity")
# Keys and choices (KEY=VALUE) of earlier versions -> the end of the message, which says what to do instead.
REMOVED = {
    "finding": "the verdicts on papers' findings were removed; leave it out, the comparison has scores and tests",
    "limits.header_seconds": "was removed; leave it out, and put a proxy before a service that strangers can reach",
    "limits.body_seconds": "was removed; leave it out, limits.request_seconds is for the whole request",
    "separate_incomparable": "was removed; leave it out, and compare runs of different test sets one kind at a time",
    "format": "the export to ONNX was removed; leave it out, nmt-export writes an archive",
    "objective=minimum_risk": "minimum risk training was removed; use likelihood, or objective=distillation",
    "logger=aim": "Aim was removed; use tensorboard, wandb or mlflow",
    "tracking": "was removed; W&B and MLflow read variables such as WANDB_PROJECT, MLFLOW_TRACKING_URI",
    "embedding.pretrained": "pretrained word vectors were removed; leave it out, or give training.start_from",
    "embedding.frozen": "was removed with pretrained word vectors; leave it out",
    **dict.fromkeys(("schedule.cycles", "schedule.cycle_growth"), "warm restarts were removed; leave it out"),
    "training.average_best": "was removed; leave it out, training.ema_decay averages weights",
    "training.checkpoint_unit": "was removed; training.checkpoint_every counts updates",
    "training.reduce_dtype": "was removed; gradients are added up in fp32",
    **dict.fromkeys(("training.scheduled_sampling", "training.scheduled_sampling_steps"), "was removed; leave it out"),
    "data.tag": "other tags than the target language's were removed; leave it out, source lines start with <2de>",
    "data.invalid_utf8": "was removed: a line that is not UTF-8 is an error; leave it out (iconv -c cleans a file)",
    "data.temperature": "was removed: an epoch has every pair once; repeat a small corpus in its train",
    "variational_dropout": "was removed, it gained nothing; leave it out and set encoder.dropout ...",
    **{key: f"was removed, it gained nothing; leave it out, {key[:7]}.dropout regularises" for key in RECURRENT},
    **{key: f"was removed; type the tag <2de> before each line (nmt-train has data.{key})" for key in LANGUAGES},
    **dict.fromkeys(DIVERSE, "diverse beams were removed; leave it out, or draw samples with search=sampling"),
    "search.coverage_floor": "was removed: attention below 0.000001 counts as this much; leave it out",
    "search.coverage_cap": "was removed: attention above 1 counts as 1; leave it out, and use search.length_penalty",
}
# Removed key -> the value with which a saved run did not use it, so that the run can still be loaded. ANY stands for
# all values of a key that affects no model. A removed key that is not listed here was unused with null, false or 0.
ANY = object()
UNUSED = {
    "data.invalid_utf8": "error",
    "search.groups": 1,
    "search.diversity": 0.5,
    "search.coverage_floor": 1e-6,
    "search.coverage_cap": 1.0,
    "schedule.cycles": 1,
    "training.average_best": 1,
    "training.reduce_dtype": "fp32",
    **dict.fromkeys(("tracking", "schedule.cycle_growth", "training.checkpoint_unit"), ANY),
    "training.scheduled_sampling_steps": ANY,
}
# Names of keys in other toolkits -> the keys here.
_OTHER_KEYS = {
    "batch_size": "training.batch_tokens training.batch_sentences search.batch_tokens",
    "clip clip_norm clip_grad_norm": "training.max_grad_norm",
    "early_stopping early_stopping_patience": "validation.patience",
    "emb_size embedding_size embedding_dim embedding.size": "embedding.dim",
    "epochs num_epochs": "training.max_epochs",
    "fp16 bf16 amp": "precision",
    "gpus num_gpus": "processes",
    "hidden_size hidden_dim rnn_size": "encoder.hidden decoder.hidden",
    "learning_rate": "optimizer.lr",
    "num_layers n_layers": "encoder.layers decoder.layers",
    "rnn_type encoder.type decoder.type": "encoder decoder",
    "save_every save_checkpoint_steps": "training.checkpoint_every",
    "valid_steps validation_freq": "validation.every",
    "warmup warmup_updates": "schedule.warmup_steps",
}
OTHER_KEYS = {name: keys.split() for names, keys in _OTHER_KEYS.items() for name in names.split()}
# A value's name in another toolkit -> its name here.
OTHER_VALUES = {"gpu": "cuda", "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
# Words that Hydra reads as something else than text.
_WORDS: dict[str, bool | None] = {"": None, "null": None, "true": True, "false": False}
# Control characters, and the lone surrogates by which Python represents bytes of a command line that are not UTF-8.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class UserError(ValueError):
    """A mistake in the input or the configuration: printed as one line without a traceback; exit status 2."""


def removed(key: str, value: object = None) -> str | None:
    """Return the message of REMOVED for a key, for its section or for KEY=VALUE; None if none of them was removed."""
    names = (key, key.partition(".")[0], f"{key}={format_value(value)}")
    return next((f"{name}: {REMOVED[name]}" for name in names if name in REMOVED), None)


def is_unused(key: str, value: object) -> bool:
    """Is this a removed key of a saved configuration, with a value that leaves it unused?"""
    return key in REMOVED and (value is None or (UNUSED[key] in (ANY, value) if key in UNUSED else not value))


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the allowed word that is a synonym or is closest in spelling, else ""."""
    candidates = [candidate for candidate in allowed if candidate != word]
    same = [candidate for candidate in candidates if candidate == OTHER_VALUES.get(word)]
    return _did_you_mean(same or difflib.get_close_matches(word[:MAX_VALUE], candidates, n=1, cutoff=0.6))


def nearest_key(key: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean ...?` for an unknown key, or "".

    Suggests the keys of any section that end in the same name (`lr`: `optimizer.lr`), else the keys with this name in
    other toolkits, else the key closest in spelling.
    """
    candidates = [candidate for candidate in allowed if candidate != key]
    key = key[:MAX_VALUE].lower()
    name = key.rpartition(".")[2]
    others = [other for other in OTHER_KEYS.get(key, OTHER_KEYS.get(name, [])) if other in candidates]
    if key not in OTHER_KEYS and "." in key:  # in a section, only the keys of this section are meant
        section = f"{key.partition('.')[0]}."
        inside = [other for other in others if other.startswith(section)]
        others = inside if any(candidate.startswith(section) for candidate in candidates) else others
    same = [candidate for candidate in candidates if candidate.rpartition(".")[2] == name]
    if others and (key in OTHER_KEYS or not same):
        return _did_you_mean(others)
    close = difflib.get_close_matches(key, same or candidates, n=1, cutoff=0.6)
    if same and ("." not in key or not close):
        close = same
    depth = min((candidate.count(".") for candidate in close), default=0)
    return _did_you_mean([candidate for candidate in close if candidate.count(".") == depth])


def _did_you_mean(words: list[str]) -> str:
    named = " or ".join(f"'{word}'" for word in words)
    return f"; did you mean {named}?" if 0 < len(words) <= MAX_SUGGESTIONS else ""


def format_value(value: object, longest: int = MAX_VALUE) -> str:
    """Return the value as a user would write it, in one printable line; a long value is cut in the middle."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if len(text) > longest:
        half = longest // 2 - 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """Escape control characters, which a terminal would interpret, and lone surrogates, which UTF-8 cannot encode."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def override_values(overrides: Iterable[str]) -> dict[str, Any]:
    """Parse overrides KEY=VALUE into a dictionary; lists and dictionaries remain text."""
    values = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        values[key] = plain_value(text)
    return values


def plain_value(text: str) -> str | int | float | bool | None:
    """Parse a value as Hydra does. YAML 1.1 would give other results for `yes`, 0x10 and 1e-05."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def quoted(value: object) -> str:
    """Write a string, such as a path, for Hydra's grammar, with quotes if it needs them."""
    text = str(value)
    if re.fullmatch(r"[a-zA-Z_/][\w./-]*", text, re.ASCII) and isinstance(plain_value(text), str):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def for_shell(key: str, value: object) -> str:
    """Write KEY=VALUE for a string or a list of strings, quoted so that a user can paste it into a shell."""
    text = f"[{','.join(map(quoted, value))}]" if isinstance(value, list) else quoted(value)
    word = f"{key}={text}"
    readable = "'" in word and not set(word) & set('"$`\\!')
    return f'"{word}"' if readable else shlex.quote(word)


def user_path(path: Path | str) -> Path:
    """Expand a leading ~ or ~USER of a path. Raises UserError if there is no such home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = str(path).partition("/")[0].removeprefix("~")
        problem = f"there is no user {user}" if user else "~ has no meaning without a home directory (HOME is not set)"
        raise UserError(f"{path}: {problem}; give an absolute path, for prepared corpora in NMT_CACHE") from None


def absolute_path(path: str) -> str:
    """Return the path from the root. Raises UserError if the working directory's name is not UTF-8 text."""
    absolute = os.path.abspath(user_path(path))
    if CONTROL.search(absolute):
        raise UserError(
            f"{format_value(absolute)}: holds control characters or bytes that are not UTF-8, which a configuration "
            "cannot hold; rename the folder, or start the command in another one (in a UTF-8 locale)"
        )
    return absolute
