"""Errors that a user can cause, reported in one line, with suggestions for misspelt names."""

import difflib
import re
from collections.abc import Iterable

MAX_VALUE_LENGTH = 100  # characters of a value in a message
MAX_SUGGESTIONS = 4
# Names that other toolkits use for our keys.
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
# Names that other toolkits use for our values.
OTHER_VALUES = {"gpu": "cuda", "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates: Python's form of bytes that are not UTF-8


class UserError(ValueError):
    """A mistake in the input or the configuration: printed as one line, exit status 2, no traceback."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the allowed word of the same meaning or the closest spelling, or an empty string."""
    candidates = [candidate for candidate in allowed if candidate != word]
    synonyms = {OTHER_VALUES.get(word), *map(_last_part, _keys_called(word))}
    matches = [candidate for candidate in candidates if candidate in synonyms]
    return _did_you_mean(matches or difflib.get_close_matches(word[:MAX_VALUE_LENGTH], candidates, n=1, cutoff=0.6))


def nearest_key(key: str, known: Iterable[str]) -> str:
    """Like `nearest` for a dotted key, which may lack its section or name a wrong one.

    Prefers keys of the same last part or meaning, then the closest spelling, then the closest last part.
    """
    candidates = [candidate for candidate in known if candidate != key]
    key = key[:MAX_VALUE_LENGTH].lower()
    name = _last_part(key)
    synonyms = _keys_called(name)
    same = [candidate for candidate in candidates if candidate in synonyms or _last_part(candidate) == name]
    close = difflib.get_close_matches(key, same if same or synonyms else candidates, n=1, cutoff=0.6)
    if same and ("." not in key or not close):
        close = same
    elif not close and not synonyms:
        names = difflib.get_close_matches(name, {*map(_last_part, candidates)}, n=1, cutoff=0.7)
        close = [candidate for candidate in candidates if _last_part(candidate) in names]
    depth = min((candidate.count(".") for candidate in close), default=0)
    return _did_you_mean([candidate for candidate in close if candidate.count(".") == depth])


def _keys_called(name: str) -> list[str]:
    """Our keys for another toolkit's name."""
    return [key for key, names in OTHER_NAMES.items() if name in names.split()]


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _did_you_mean(words: list[str]) -> str:
    quoted = " or ".join(f"'{word}'" for word in words)
    return f"; did you mean {quoted}?" if 0 < len(words) <= MAX_SUGGESTIONS else ""


def format_value(value: object, max_length: int = MAX_VALUE_LENGTH) -> str:
    """A value as a user would write it, on one printable line; a long one is cut in the middle."""
    if value is None:
        return "null"
    try:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:  # Python refuses to convert integers of more than 4300 digits
        return "an integer of thousands of digits"
    if len(text) > max_length:
        half = max_length // 2 - 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """Escape control characters, which a terminal would obey, and lone surrogates, which UTF-8 cannot encode."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
