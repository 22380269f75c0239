"""Training SentencePiece tokenizers, with Unicode NFC as a normalisation rule.

SentencePiece's own rules fold compatibility characters (NFKC): full-width punctuation becomes half-width, and a
zero-width non-joiner becomes a space. Translations should keep these.
"""

import io
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from typing import Any
from unicodedata import category, normalize

import sentencepiece

from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import data as schema
from nmt.data.tokenizer import Tokenizer, Tokenizers, clean
from nmt.data.word_alignment import WORD_START

LONGEST_LINE = 2**16  # bytes; longer lines are left out
PAD, UNK, BOS, EOS = 0, 1, 2, 3  # in models trained here
NO_RULE_FILE = b"\x1a\x02\x32\x00"  # appended to a model, it clears normalizer_spec.normalization_rule_tsv
CHARACTERS = [chr(code) for code in range(0x30000)]  # later ones have no canonical decomposition
BYTE_ORDER_MARK = "\ufeff"

Lines = Callable[[], Iterator[str]]


def make_tokenizers(
    config: schema.TokenizerConfig, source: Lines, target: Lines, tags: Sequence[str] = ()
) -> Tokenizers:
    """Train on these lines, or load existing models. `tags` before source lines are symbols that are never split.

    Raises UserError, for example for an impossible vocab_size.
    """
    if isinstance(config, schema.FileTokenizer):
        names = [name for name in (config.source_model, config.target_model) if name is not None]
        models = [Tokenizer.load(user_path(name), config.lowercase) for name in names]
        tokenizers = Tokenizers(models[0], models[-1])
        check_sampling(config, tokenizers)
        return tokenizers
    if config.joint:
        joint = _train(config, lambda: (line for side in (source, target) for line in side()), tags)
        return Tokenizers(joint, joint)
    return Tokenizers(_train(config, source, tags), _train(config, target, ()))


def check_sampling(config: schema.FileTokenizer, tokenizers: Tokenizers) -> None:
    """Raises UserError if segmentations are to be sampled with a model that does not support it."""
    names = config.source_model, config.target_model or config.source_model
    for alpha, name, tokenizer in zip(config.sampling_by_side, names, tokenizers, strict=True):
        if alpha and not tokenizer.can_sample():
            reason = "is not a bpe or unigram model, or it is a bpe model with unused pieces"
            raise UserError(f"tokenizer.sampling={alpha}: {name} {reason}; set it to 0")


def _train(config: schema.TrainedTokenizer, lines: Lines, tags: Sequence[str]) -> Tokenizer:
    model = io.BytesIO()
    symbols: dict[str, Any] = {"user_defined_symbols": [f"{WORD_START}{tag}" for tag in tags]} if tags else {}
    try:
        with _normalization_options(config.normalization) as normalization:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(clean(line, config.lowercase) for line in lines()),
                model_writer=model,
                model_type=config.kind,
                vocab_size=config.vocab_size,
                hard_vocab_limit=config.kind in {"bpe", "unigram"},
                byte_fallback=config.byte_fallback,
                character_coverage=config.character_coverage,
                split_by_unicode_script=config.split_punctuation,
                pad_id=PAD,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                max_sentence_length=LONGEST_LINE,
                minloglevel=2,
                **normalization,
                **symbols,
            )
    except RuntimeError as error:
        raise UserError(_explanation(str(error), config)) from None
    trained = model.getvalue()
    if config.normalization == "nfc":  # the name of a temporary file would make equal models differ
        trained = sentencepiece.SentencePieceProcessor(model_proto=trained + NO_RULE_FILE).serialized_model_proto()
    return Tokenizer(trained, config.lowercase)


def _explanation(message: str, config: schema.TrainedTokenizer) -> str:
    """SentencePiece's error message as advice to the user."""
    setting = f"tokenizer.vocab_size={config.vocab_size}"
    if limit := re.search(r"value <= (\d+)", message):
        return f"{setting}: the training corpus allows at most {limit[1]}; set tokenizer.vocab_size={limit[1]} or less"
    if limit := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"{setting}: the training corpus has more characters; set tokenizer.vocab_size={int(limit[1]) + 1} or "
            "more, or tokenizer.character_coverage below 1.0"
        )
    if "(vocab_size) >= (0)" in message:
        return f"{setting}: tokenizer.byte_fallback takes 256 pieces; set tokenizer.vocab_size={256 + EOS + 2} or more"
    if "(all_chars_count) > (0)" in message:
        return f"tokenizer.normalization={config.normalization}: leaves nothing of the training text"
    if "!sentences_.empty()" in message:
        return f"data.train: every line has more than {LONGEST_LINE:,} bytes; write one sentence per line"
    return f"tokenizer: SentencePiece could not be trained ({message.strip().splitlines()[-1]})"


@contextmanager
def _normalization_options(name: str) -> Iterator[dict[str, Any]]:
    """Training options for a rule that SentencePiece has built in, or for "nfc", whose rule is in a temporary file."""
    if name != "nfc":
        yield {"normalization_rule_name": name}
        return
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="ascii") as file:
        file.write(nfc_rule())
        file.flush()
        yield {"normalization_rule_tsv": file.name}


@cache
def nfc_rule() -> str:
    """Unicode NFC as SentencePiece's rule table: text, tab, replacement, as hexadecimal code points.

    Every canonically equivalent spelling of a composed character becomes its NFC form, white space becomes a space, and
    control characters and byte order marks are removed.
    """
    replacements: dict[str, str] = {}
    for decomposed, characters in _composed().items():
        spellings = [*_spellings(decomposed), *characters]
        replacements |= dict.fromkeys(spellings, normalize("NFC", decomposed))
    for char in CHARACTERS[1:]:  # a rule cannot replace NUL
        if char.isspace():
            replacements[char] = " "
        elif category(char) == "Cc" or char == BYTE_ORDER_MARK:
            replacements[char] = ""
    return "".join(f"{_hexadecimal(text)}\t{_hexadecimal(by)}\n" for text, by in replacements.items() if text != by)


@cache
def _composed() -> dict[str, list[str]]:
    """Canonical decompositions, each with the characters that decompose to it."""
    composed = defaultdict(list)
    for char in CHARACTERS:
        if (decomposed := normalize("NFD", char)) != char:
            composed[decomposed].append(char)
    return dict(composed)


def _spellings(decomposed: str) -> Iterator[str]:
    """Canonically equivalent spellings: all orders of the marks, with and without composing the first ones."""
    for order in map("".join, permutations(decomposed)):
        if normalize("NFD", order) == decomposed:
            for end in range(1, len(order) + 1):
                head, tail = order[:end], order[end:]
                for composed in [head, *_composed().get(normalize("NFD", head), [])]:
                    yield composed + tail


def _hexadecimal(text: str) -> str:
    return " ".join(f"{ord(char):X}" for char in text)
