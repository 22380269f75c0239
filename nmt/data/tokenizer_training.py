"""Training SentencePiece tokenizers."""

import io
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from typing import Any
from unicodedata import category, normalize

import sentencepiece

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.config.paths import user_path
from nmt.data.tokenizer import Tokenizer, Tokenizers, clean

TRAINING_LINES = 2_000_000  # that train a tokenizer: a sample of that many suffices, in bounded memory
LONGEST_LINE = 2**16  # bytes of a line that takes part in training a tokenizer
PAD, UNK, BOS, EOS = 0, 1, 2, 3  # of the models trained here; an existing model may have others
NO_RULE_FILE = b"\x1a\x02\x32\x00"  # appended to a model, it overrides normalizer_spec.normalization_rule_tsv with ""


Lines = Callable[[], Iterator[str]]


def make_tokenizers(config: schema.TokenizerConfig, source: Lines, target: Lines) -> Tokenizers:
    """Train on the training lines, or load existing models. Raises UserError for sizes the text does not allow."""
    if isinstance(config, schema.FileTokenizer):
        names = [name for name in (config.source_model, config.target_model) if name is not None]
        loaded = [Tokenizer.load(user_path(name), config.lowercase) for name in names]
        tokenizers = Tokenizers(loaded[0], loaded[-1])
        check_sampling(config, tokenizers)
        return tokenizers
    if config.joint:
        joint = _train(config, lambda: (line for side in (source, target) for line in side()))
        return Tokenizers(joint, joint)
    return Tokenizers(_train(config, source), _train(config, target))


def check_sampling(config: schema.FileTokenizer, tokenizers: Tokenizers) -> None:
    """Raises UserError if a side's segmentations are to be drawn and its model does not allow it."""
    names = config.source_model, config.target_model or config.source_model
    for alpha, name, tokenizer in zip(config.sampling_by_side, names, tokenizers, strict=True):
        if alpha and not tokenizer.samples():
            reason = "is no bpe or unigram model, or a bpe one with unused pieces"
            raise UserError(f"tokenizer.sampling={alpha}: {name} {reason}; set it to 0")


def _train(config: schema.TrainedTokenizer, lines: Lines) -> Tokenizer:
    model = io.BytesIO()
    try:
        with _normalization(config.normalization) as rule:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(clean(line, config.lowercase) for line in _at_most(TRAINING_LINES, lines)),
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
                **rule,
            )
    except RuntimeError as error:
        raise UserError(_explain(str(error), config)) from None
    trained = model.getvalue()
    if "normalization_rule_tsv" in rule:  # equal corpora are to give equal models
        trained = sentencepiece.SentencePieceProcessor(model_proto=trained + NO_RULE_FILE).serialized_model_proto()
    return Tokenizer(trained, config.lowercase)


@contextmanager
def _normalization(name: str) -> Iterator[dict[str, Any]]:
    """SentencePiece's options for one of its own rules, or for "nfc" from a file."""
    if name != "nfc":
        yield {"normalization_rule_name": name}
        return
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="ascii") as file:
        file.write(nfc_rule())
        file.flush()
        yield {"normalization_rule_tsv": file.name}


def _at_most(count: int, lines: Lines) -> Iterator[str]:
    """All lines, or a sample of that many, always the same one (SentencePiece's own is another in every process)."""
    total = sum(1 for _ in lines())
    rng = random.Random(1)
    wanted = min(count, total)
    for line, left in zip(lines(), range(total, 0, -1), strict=True):
        if rng.random() * left < wanted:  # every subset of that size is as likely (Knuth, algorithm S)
            wanted -= 1
            yield line


def _explain(message: str, config: schema.TrainedTokenizer) -> str:
    given = f"tokenizer.vocab_size={config.vocab_size}"
    if limit := re.search(r"value <= (\d+)", message):
        return f"{given}: the training corpus allows at most {limit[1]}; set tokenizer.vocab_size={limit[1]} or less"
    if limit := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"{given}: the training corpus has more characters; set tokenizer.vocab_size={int(limit[1]) + 1} or "
            "more, or tokenizer.character_coverage below 1.0"
        )
    if "(vocab_size) >= (0)" in message:
        return f"{given}: tokenizer.byte_fallback takes 256 pieces; set tokenizer.vocab_size={256 + EOS + 2} or more"
    if "(all_chars_count) > (0)" in message:
        return f"tokenizer.normalization={config.normalization}: leaves nothing of the training text"
    if "!sentences_.empty()" in message:
        return f"data.train: every line has more than {LONGEST_LINE:,} bytes; it must be one sentence a line"
    return f"tokenizer: SentencePiece could not be trained ({message.strip().splitlines()[-1]})"


CHARACTERS = [chr(code) for code in range(0x30000)]  # no later character has a canonical decomposition
BYTE_ORDER_MARK = "\ufeff"


@cache
def nfc_rule() -> str:
    """The rule as a table for SentencePiece: what is replaced, a tab, its replacement; characters in hexadecimal.

    Every canonical spelling of a composed character becomes its NFC form. White space becomes a space. Control
    characters and byte order marks are dropped.
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
    """Canonical decompositions, each with the characters that have it."""
    composed = defaultdict(list)
    for char in CHARACTERS:
        if (decomposed := normalize("NFD", char)) != char:
            composed[decomposed].append(char)
    return dict(composed)


def _spellings(decomposed: str) -> Iterator[str]:
    """What is canonically equivalent: marks in other orders, the first of them composed with the base or not."""
    for order in map("".join, permutations(decomposed)):
        if normalize("NFD", order) == decomposed:
            for end in range(1, len(order) + 1):
                head, tail = order[:end], order[end:]
                for composed in [head, *_composed().get(normalize("NFD", head), [])]:
                    yield composed + tail


def _hexadecimal(text: str) -> str:
    return " ".join(f"{ord(char):X}" for char in text)
