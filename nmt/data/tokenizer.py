"""SentencePiece tokenizers: training, loading, and the only place that knows the ids of special symbols."""

import io
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.config.paths import user_path
from nmt.data.normalization import nfc_rule
from nmt.data.sampling import Sampler, sampler
from nmt.files import read_bytes, write_atomically
from nmt.metrics.alignment import WORD_START

TRAINING_LINES = 2_000_000  # that train a tokenizer: a sample of that many suffices, in bounded memory
LONGEST_LINE = 2**16  # bytes of a line that takes part in training a tokenizer
PAD, UNK, BOS, EOS = 0, 1, 2, 3  # of the models trained here; an existing model may have others
NO_RULE_FILE = b"\x1a\x02\x32\x00"  # appended to a model, it overrides normalizer_spec.normalization_rule_tsv with ""
LONE_SURROGATES = re.compile("[\ud800-\udfff]")  # which Python's strings can hold and Unicode text cannot


class Tokenizer:
    """One language's text <-> token ids. Adds no <s>, always adds </s>.

    decode(encode(line)) is the line after normalization, with one space for each run of spaces and none at its ends;
    unless a piece is unknown, which byte_fallback rules out. Special symbols written in a line are text like any other,
    and a lone surrogate is read as U+FFFD.
    """

    def __init__(self, model: bytes, lowercase: bool = False, name: str = "tokenizer") -> None:
        """Raises UserError if the bytes are no SentencePiece model or one without <s> or </s>."""
        self.model, self.lowercase = model, lowercase
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError):
            raise UserError(f"{name}: is not a SentencePiece model") from None
        self.unk, self.bos, self.eos = (
            self._processor.unk_id(),
            self._processor.bos_id(),
            self._processor.eos_id(),
        )
        if min(self.bos, self.eos) < 0:
            raise UserError(f"{name}: the SentencePiece model lacks <s> or </s>; train it with bos_id and eos_id")
        size = self._processor.get_piece_size()
        has_pad = self._processor.pad_id() >= 0
        self.pad = self._processor.pad_id() if has_pad else size  # a model without padding gets one id more
        self.vocab_size = size if has_pad else size + 1

    @classmethod
    def load(cls, path: Path, lowercase: bool = False) -> "Tokenizer":
        """Raises UserError if the file is missing or no SentencePiece model."""
        try:
            return cls(read_bytes(path), lowercase, str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot read the tokenizer ({error.strerror})") from None

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Lines -> ids, each ending in </s>."""
        encoded: list[list[int]] = self._processor.encode(self._prepare(lines), add_eos=True)
        return encoded

    def sample(self, lines: Sequence[str], alpha: float, seeds: Sequence[int]) -> list[list[int]]:
        """Like encode, with segmentations drawn anew (BPE-dropout, or subword regularisation for unigram models),
        the same for a seed in every process.

        Each line has its own seed, of 32 bits: what is drawn for it does not depend on the lines beside it.
        """
        assert self._sampler is not None
        normalised = self._processor.normalize(self._prepare(lines))
        return [
            [*self._sampler.draw(line, alpha, seed), self.eos] for line, seed in zip(normalised, seeds, strict=True)
        ]

    def samples(self) -> bool:
        """Can this model draw segmentations? (Those of BPE, if they use all their pieces, and of unigrams.)"""
        return self._sampler is not None

    @cached_property
    def _sampler(self) -> Sampler | None:
        return sampler(self.model)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text in one line, without special symbols."""
        text: str = self._processor.decode([i for i in ids if i not in {self.pad, self.bos, self.eos}])
        return _with_spaces(text.removeprefix(WORD_START))  # bytes can spell ends of lines and the mark of a space

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Ids -> pieces, "▁" before a word's first, and </s> where it is."""
        return ["<pad>" if i == self.pad else self._processor.id_to_piece(int(i)) for i in ids]

    def surfaces(self, lines: Sequence[str]) -> list[list[str]]:
        """Lines -> pieces as `encode` cuts them, unknown ones as they are written instead of <unk>; </s> last.

        "▁" stands for spaces of the line: see `with_spaces_of`.
        """
        cut: list[list[str]] = self._processor.encode(self._prepare(lines), out_type=str, add_eos=True)
        return [self.with_spaces_of(line, pieces) for line, pieces in zip(lines, cut, strict=True)]

    def with_spaces_of(self, line: str, pieces: list[str]) -> list[str]:
        """The pieces of a line, with "▁" only for spaces of the line: their words are those that spaces separate.

        Other white space that normalization makes a space, such as a no-break space, stands as in the line.
        """
        if line.isascii() and line.isprintable():
            return pieces
        (prepared,) = self._prepare([line])
        written = line.lower() if self.lowercase else line  # has as many characters
        text, origins = self._processor.normalize(prepared, with_offsets=True)
        marks = iter([i for i, char in enumerate(text) if char == WORD_START])

        def spaces(match: re.Match[str]) -> str:
            i = next(marks)
            span = _with_no_break(written[origins[i] if i else 0 : origins[i + 1]])
            before, space, after = re.sub(" +", WORD_START, span).rpartition(WORD_START)
            if i == 0 and not span:
                space = WORD_START  # SentencePiece writes one before a line
            return f"{before}{match[1]}{space}{after}"

        return re.sub(f"(\n?){WORD_START}", spaces, "\n".join(pieces)).split("\n")

    def _prepare(self, lines: Sequence[str]) -> list[str]:
        return [_readable(line.lower() if self.lowercase else line) for line in lines]


def _readable(line: str) -> str:
    """The line as SentencePiece is to see it, in training and after."""
    line = _with_spaces(line)
    return line if line.isascii() else LONE_SURROGATES.sub("\ufffd", line)


def _with_spaces(text: str) -> str:
    """Spaces for SentencePiece's own mark of one, and for ends of lines."""
    return text.replace(WORD_START, " ").replace("\n", " ").replace("\r", " ")


def _with_no_break(text: str) -> str:
    """No-break spaces for what `_with_spaces` replaces: none of it separates words."""
    return re.sub(f"[{WORD_START}\r\n]", "\xa0", text)


class Tokenizers(NamedTuple):
    """Both languages' tokenizers; one and the same object where the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    def save(self, directory: Path) -> None:
        """tokenizer.model, or source.model and target.model."""
        if self.source is self.target:
            write_atomically(directory / "tokenizer.model", self.source.model)
        else:
            write_atomically(directory / "source.model", self.source.model)
            write_atomically(directory / "target.model", self.target.model)

    @classmethod
    def load(cls, directory: Path, lowercase: bool) -> "Tokenizers":
        """What `save` wrote. Raises UserError."""
        joint = directory / "tokenizer.model"
        if joint.exists():
            tokenizer = Tokenizer.load(joint, lowercase)
            return cls(tokenizer, tokenizer)
        return cls(
            Tokenizer.load(directory / "source.model", lowercase),
            Tokenizer.load(directory / "target.model", lowercase),
        )


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
                sentence_iterator=(
                    _readable(line.lower() if config.lowercase else line) for line in _at_most(TRAINING_LINES, lines)
                ),
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
