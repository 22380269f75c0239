"""What a user can cause, told in one line."""

import difflib
import re
from collections.abc import Iterable

LONGEST = 100  # characters of a value in a message
# Names that other toolkits give to keys of ours, by their last part, ...
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
# ... and to values.
OTHER_VALUES = {"gpu": "cuda", "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
MOST = 4  # keys that are suggested together
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # with bytes that are not UTF-8, as Python holds them


class UserError(ValueError):
    """A mistake in the input or the configuration: shown as one line, exit status 2, no traceback."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the allowed word that means the same or is closest, or an empty string."""
    words = [word for word in allowed if word != given]
    meant = {OTHER_VALUES.get(given), *map(_end, _meant_by(given))}
    same = [word for word in words if word in meant]
    return _did_you_mean(same or difflib.get_close_matches(given[:LONGEST], words, n=1, cutoff=0.6))


def nearest_key(given: str, known: Iterable[str]) -> str:
    """The same for a key: those that end alike or mean the same, whatever section is given; else the closest one, else
    those whose last parts are closest."""
    keys = [key for key in known if key != given]
    wanted, end = given[:LONGEST].lower(), _end(given[:LONGEST].lower())
    meant = _meant_by(end)
    same = [key for key in keys if key in meant or _end(key) == end]
    close = difflib.get_close_matches(wanted, same if same or meant else keys, n=1, cutoff=0.6)
    if same and ("." not in wanted or not close):
        close = same
    elif not close and not meant:
        ends = difflib.get_close_matches(end, {*map(_end, keys)}, n=1, cutoff=0.7)
        close = [key for key in keys if _end(key) in ends]
    shallow = min((key.count(".") for key in close), default=0)
    return _did_you_mean([key for key in close if key.count(".") == shallow])


def _meant_by(name: str) -> list[str]:
    return [key for key, names in OTHER_NAMES.items() if name in names.split()]


def _end(key: str) -> str:
    return key.rpartition(".")[2]


def _did_you_mean(words: list[str]) -> str:
    named = " or ".join(f"'{word}'" for word in words)
    return f"; did you mean {named}?" if 0 < len(words) <= MOST else ""


def format_value(value: object, longest: int = LONGEST) -> str:
    """As a user would write it, in one line that a terminal can show; of a long one its two ends."""
    if value is None:
        return "null"
    try:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "an integer of thousands of digits"
    if len(text) > longest:
        half = longest // 2 - 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """Control characters, which a terminal would obey, and lone surrogates, which UTF-8 lacks, as escapes."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
