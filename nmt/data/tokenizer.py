"""SentencePiece tokenizers: their training, and the conversion of text to token ids and back.

A model that is trained here applies no rule of SentencePiece, but names a Unicode form, into which `Tokenizer` brings
the text. Models from elsewhere apply their own rules.

Shapes: S source positions, T target positions, V tokens of the vocabulary.
"""

import io
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unicodedata import category, is_normalized, normalize

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from nmt.config.errors import UserError, user_path
from nmt.config.schema import data as schema
from nmt.data.bpe_dropout import BpeDropout
from nmt.data.text import is_blank
from nmt.data.word_alignment import END, UNKNOWN, WORD_START
from nmt.system.files import read_bytes, write_atomically

log = logging.getLogger(__name__)
# Matches a piece that continues a word: it starts with a letter, digit or hyphen, or is a byte of byte_fallback.
CONTINUATION = re.compile("[^\\W_]|[-\u2010\u2011]|<0x[0-9A-F]{2}>$")
RESERVED = "\u2585"  # SentencePiece trains on no line that contains this character
TOKENIZER_FILES = ("tokenizer.model", "source.model", "target.model")  # a run has one shared model, or one per language
LONGEST_LINE = 2**16  # in bytes; the training of a tokenizer leaves out longer lines
PAD, UNK, BOS, EOS = 0, 1, 2, 3  # token ids in the models that nmt trains
# Unicode forms that a model may name.
FORMS: dict[str, Literal["NFC", "NFD", "NFKC", "NFKD"]] = {"nfc": "NFC", "nfd": "NFD", "nfkc": "NFKC", "nfkd": "NFKD"}
# Control characters that are not white space, and the byte order mark.
CONTROLS = re.compile("[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufeff]")
WHITE_SPACE = re.compile(f"[\\s{WORD_START}]")

# Matches the letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which write no space between words.
SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
LONE_SURROGATES = re.compile("[\ud800-\udfff]")  # possible in Python strings, but not in UTF-8


class Tokenizer:
    """Converts text of one language to token ids, which end with </s> and contain no <s>, and back.

    `decode` of `encode` returns the normalised line without leading, trailing or repeated spaces. Only unknown
    characters are lost; with byte_fallback, no character is unknown. `encode` treats special symbols in a line, such as
    "</s>", as ordinary text, and a lone surrogate as U+FFFD. If the model names a Unicode form, pieces are in this
    form, and decoded text is composed (NFC).
    """

    def __init__(self, model: bytes, lowercase: bool = False, name: str = "tokenizer") -> None:
        """Parse the bytes of a SentencePiece model. Raises UserError, with a message that starts with `name`, if they
        are not a model, if it lacks <s> or </s>, or if it does not put "▁" before each word."""
        self.model, self.lowercase = model, lowercase
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError):
            raise UserError(f"{name}: is not a SentencePiece model") from None
        processor = self._processor
        rule = _proto(model).normalizer_spec
        self.form = rule.name if rule.name in FORMS and not rule.precompiled_charsmap else "none"
        self.unk, self.bos, self.eos = processor.unk_id(), processor.bos_id(), processor.eos_id()
        if min(self.bos, self.eos) < 0:
            raise UserError(
                f"{name}: the SentencePiece model lacks <s> or </s>; train it without bos_id=-1 and eos_id=-1"
            )
        if not processor.normalize("a").startswith(WORD_START):
            raise UserError(
                f"{name}: the SentencePiece model does not put {WORD_START} before each word; train it without "
                "add_dummy_prefix=false and treat_whitespace_as_suffix=true"
            )
        for piece, token in ((END, self.eos), (UNKNOWN, self.unk)):
            if processor.piece_to_id(piece) not in {token, self.unk}:
                raise UserError(f"{name}: the SentencePiece model has {piece} as an ordinary piece; train it without")
        size, pad = processor.get_piece_size(), processor.pad_id()
        # A model without a padding token gets one after its last token.
        self.pad, self.vocab_size = (pad, size) if pad >= 0 else (size, size + 1)

    @classmethod
    def load(cls, path: Path, lowercase: bool = False) -> "Tokenizer":
        """Read a SentencePiece model. Raises UserError if the file cannot be read or is not a model."""
        try:
            return cls(read_bytes(path), lowercase, str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot read the tokenizer ({error.strerror})") from None

    def same_as(self, other: "Tokenizer") -> bool:
        """Check whether both tokenizers give every text the same tokens."""
        return (self.model, self.lowercase) == (other.model, other.lowercase)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[bytes, bool]]:
        return Tokenizer, (self.model, self.lowercase)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Segment lines into token ids. The last token of each line is </s>."""
        encoded: list[list[int]] = self._processor.encode(self._clean(lines), add_eos=True)
        return encoded

    def sample(self, lines: Sequence[str], alpha: float, seeds: Sequence[int]) -> list[list[int]]:
        """Segment lines into token ids at random, by BPE-dropout that skips merges with probability `alpha`. `seeds`
        holds a 32-bit seed for each line, on which its segmentation depends alone."""
        assert self._bpe_dropout is not None
        normalised = self._processor.normalize(self._clean(lines))
        return [
            [*self._bpe_dropout.draw(line, alpha, seed), self.eos] for line, seed in zip(normalised, seeds, strict=True)
        ]

    def can_sample(self) -> bool:
        """Check whether the model supports `sample`: it is a BPE model without unused pieces."""
        return self._bpe_dropout is not None

    @cached_property
    def _bpe_dropout(self) -> BpeDropout | None:
        return BpeDropout.of(_proto(self.model))

    def decode(self, ids: Sequence[int]) -> str:
        """Convert token ids to one line of text without special symbols."""
        text: str = self._processor.decode([i for i in ids if i not in {self.pad, self.bos, self.eos}])
        return self._composed(_with_spaces(text.removeprefix(WORD_START)))  # byte pieces can spell line ends and "▁"

    def spell(self, pieces: Iterable[str]) -> str:
        """Join the pieces of a line, without "</s>", to text as `decode` returns it."""
        return self._composed(join(pieces))

    def _composed(self, text: str) -> str:
        return text if self.form == "none" else normalize("NFC", text)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Convert token ids to pieces, in which "▁" marks the start of a word. Padding, the unknown token and the end
        are "<pad>", "<unk>" and "</s>", whatever the model calls them."""
        special = {self.pad: "<pad>", self.unk: UNKNOWN, self.eos: END}
        return [special.get(i) or self._processor.id_to_piece(int(i)) for i in ids]

    def id_of(self, piece: str) -> int | None:
        """Look up the id of a piece, spelled as in `pieces`. Returns None if the vocabulary lacks it, and for padding,
        <s> and </s>."""
        token: int = self._processor.piece_to_id(piece)
        exists = self.pieces([token]) == [piece]
        return token if exists and token not in {self.pad, self.bos, self.eos} else None

    def encode_phrase(self, phrase: str) -> list[int]:
        """Segment a phrase as in the middle of a sentence, without </s>. In a script without spaces, its first piece
        has no "▁"."""
        tokens = self.encode([phrase])[0][:-1]
        if not SPACELESS.match(phrase) or not tokens:
            return tokens
        first = self.pieces(tokens[:1])[0].removeprefix(WORD_START)
        pieces = [first] if self.id_of(first) is not None else list(first)
        ids = [token for piece in pieces if (token := self.id_of(piece)) is not None]
        return [*ids, *tokens[1:]] if len(ids) == len(pieces) else tokens

    def vocabulary(self) -> dict[str, int]:
        """Map the pieces that spell text, spelled as in `pieces`, to their ids: all but special symbols."""
        pieces = enumerate(self.pieces(range(self._processor.get_piece_size())))
        is_control, is_unknown = self._processor.is_control, self._processor.is_unknown
        return {piece: token for token, piece in pieces if not is_control(token) and not is_unknown(token)}

    @cached_property
    def boundary(self) -> NDArray[np.bool_]:
        """Mark the tokens that do not continue the preceding word -> bool (V,). A token continues the word if it starts
        with a letter, a digit, a hyphen or a combining mark, or is a byte of byte_fallback. Letters of scripts without
        spaces continue no word."""

        def continues(piece: str) -> bool:
            if category(piece[0])[0] == "M":
                return True
            return CONTINUATION.match(piece) is not None and not SPACELESS.match(piece)

        return np.array([not continues(piece) for piece in self.pieces(range(self.vocab_size))])

    def surfaces(self, lines: Sequence[str]) -> list[list[str]]:
        """Segment lines into the same pieces as `encode`, but show unknown pieces as they stand in the text instead of
        "<unk>". The last piece of each line is "</s>". "▁" stands only for spaces of the line: see `restore_spaces`."""
        segmented: list[list[str]] = self._processor.encode(self._clean(lines), out_type=str)
        return [self.restore_spaces(line, [*pieces, END]) for line, pieces in zip(lines, segmented, strict=True)]

    def surfaces_of(self, line: str, ids: Iterable[int]) -> list[str]:
        """Convert `ids`, the token ids of one segmentation of `line`, to pieces like those that `surfaces` returns."""
        pieces = self.pieces(ids)
        if UNKNOWN in pieces:
            text = self._processor.normalize(self._clean([line])[0])
            ends = [*map(re.escape, pieces[1:-1]), "$"]  # an unknown piece ends where the next piece starts
            pairs = zip(pieces[:-1], ends, strict=True)
            parts = (f"(?>.+?(?={end}))" if piece == UNKNOWN else re.escape(piece) for piece, end in pairs)
            pattern = "".join(f"({part})" for part in parts)
            if match := re.fullmatch(pattern, text, re.DOTALL):
                pieces = [*match.groups(), pieces[-1]]
        return self.restore_spaces(line, pieces)

    def restore_spaces(self, line: str, pieces: list[str]) -> list[str]:
        """Keep "▁" in a line's pieces only where the line has a space, so that only spaces separate words.

        Normalisation turns other white space, such as a no-break space, into a space. This method puts the original
        character back.
        """
        if line.isascii() and line.isprintable():
            return pieces
        (cleaned,) = self._clean([line])
        original = normalised(line, self.form, self.lowercase)  # same length as `cleaned`, so `origins` index both
        text, origins = self._processor.normalize(cleaned, with_offsets=True)
        marks = iter([i for i, char in enumerate(text) if char == WORD_START])

        def restore(match: re.Match[str]) -> str:
            """Replace a "▁", with the boundary of pieces before it if there is one, by what the line has there."""
            i = next(marks)
            # The characters that `_with_spaces` replaces do not separate words: show them as no-break spaces.
            span = re.sub(f"[{WORD_START}\r\n]", "\xa0", original[origins[i] if i else 0 : origins[i + 1]])
            # Characters before the last space end the previous piece, characters after it begin the next one.
            before, space, after = re.sub(" +", WORD_START, span).rpartition(WORD_START)
            if i == 0 and not span:
                space = WORD_START  # SentencePiece puts "▁" at the start of every line
            return f"{before}{match[1]}{space}{after}"

        # Pieces hold no newline, so that it can mark their boundaries here.
        return re.sub(f"(\n?){WORD_START}", restore, "\n".join(pieces)).split("\n")

    def _clean(self, lines: Sequence[str]) -> list[str]:
        return [clean(line, self.form, self.lowercase) for line in lines]


def _proto(model: bytes) -> Any:  # noqa: ANN401
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]


def normalised(line: str, form: str, lowercase: bool) -> str:
    """Bring a line into a Unicode form without control characters, or leave it as it is with form="none"; lowercase it
    first if asked.

    Keeps each space, and makes no other: a space that the form would put in place of another character, as NFKC does
    for U+2003, becomes U+00A0.
    """
    line = line.lower() if lowercase else line
    if line.isascii() and line.isprintable():
        return line
    line = LONE_SURROGATES.sub("\ufffd", line)
    if form == "none":
        return line
    line = CONTROLS.sub("", line)
    if is_normalized(FORMS[form], line):  # most lines are, and this check is quick
        return line
    return " ".join(normalize(FORMS[form], part).replace(" ", "\xa0") for part in line.split(" "))


def clean(line: str, form: str, lowercase: bool) -> str:
    """Prepare a line for SentencePiece: `normalised`, with a space for each character that SentencePiece cannot take
    and, in a Unicode form, for all white space."""
    line = normalised(line, form, lowercase)
    return _with_spaces(line) if form == "none" else WHITE_SPACE.sub(" ", line)


def _with_spaces(text: str) -> str:
    """Put spaces in place of line ends and of "▁", which SentencePiece uses internally."""
    return text.replace(WORD_START, " ").replace("\n", " ").replace("\r", " ")


class Tokenizers(NamedTuple):
    """The tokenizers of both languages. If they share one, both fields hold the same object."""

    source: Tokenizer
    target: Tokenizer

    def save(self, directory: Path) -> None:
        """Write tokenizer.model if the languages share it, else source.model and target.model; remove the others."""
        shared, source, target = TOKENIZER_FILES
        models = {shared: self.source} if self.source is self.target else {source: self.source, target: self.target}
        for name in TOKENIZER_FILES:
            if name in models:
                write_atomically(directory / name, models[name].model)
            else:
                (directory / name).unlink(missing_ok=True)

    @classmethod
    def load(cls, directory: Path, lowercase: bool) -> "Tokenizers":
        """Read the files that `save` wrote. Raises UserError if one is missing or broken."""
        if (shared := directory / "tokenizer.model").exists():
            tokenizer = Tokenizer.load(shared, lowercase)
            return cls(tokenizer, tokenizer)
        source, target = (Tokenizer.load(directory / f"{name}.model", lowercase) for name in ("source", "target"))
        return cls(source, target)


def copy_unknown(pieces: Sequence[str], weights: NDArray[np.float32], source: Sequence[str]) -> list[str]:
    """Replace each "<unk>" by the source piece that has the largest attention weight (Luong et al. 2015, section 4).

    pieces: (T,); weights: (T, S); source: (S,), the source pieces as `Tokenizer.surfaces` returns them. A lone "▁"
    counts as part of the piece after it. "</s>" is never copied: if it has all the weight, "<unk>" stays.
    """
    weights, candidates = np.where([piece == END for piece in source], 0.0, weights), list(source)
    for s, (piece, following) in enumerate(pairwise(source)):
        if piece == WORD_START:
            candidates[s + 1] = WORD_START + following.removeprefix(WORD_START)
            weights[:, s + 1] += weights[:, s] if following != END else 0.0
            weights[:, s] = 0.0
    copied: list[str] = []
    for piece, row in zip(pieces, weights, strict=True):
        copy = candidates[row.argmax()] if piece == UNKNOWN and row.any() else piece
        after_space = bool(copied) and copied[-1].endswith(WORD_START)
        copied.append(copy.removeprefix(WORD_START) if copy is not piece and after_space else copy)
    return copied


def join(pieces: Iterable[str]) -> str:
    """Join the pieces of a line, without "</s>", to its text."""
    return "".join(piece for piece in pieces if piece != END).replace(WORD_START, " ").strip()


def encode_lines(
    tokenizer: Tokenizer, lines: Sequence[str], limit: int, name: str, first_line: int = 1
) -> tuple[list[list[int]], list[list[str]]]:
    """Segment each line into token ids and the pieces of `Tokenizer.surfaces`. Lines are cut to `limit` tokens.

    A cut logs a warning such as "line 3 has 900 tokens": `name` is the word "line", and `first_line` is the number of
    lines[0]. A line without visible characters becomes </s> alone. Lines are encoded one by one, so that memory holds
    all tokens of at most one overlong line.
    """
    encoded: list[list[int]] = []
    surfaces: list[list[str]] = []
    for number, line in enumerate(lines, first_line):
        text = "" if is_blank(line) else line
        (ids,), (pieces,) = tokenizer.encode([text]), tokenizer.surfaces([text])
        if len(ids) > limit:
            log.warning("%s %d has %d tokens: cut to search.max_source_length=%d", name, number, len(ids), limit)
            del ids[limit - 1 : -1], pieces[limit - 1 : -1]  # keeps </s>
        encoded.append(ids)
        surfaces.append(pieces)
    return encoded, surfaces


# Training


def make_tokenizers(
    config: schema.TokenizerConfig, source: Iterable[str], target: Iterable[str], tags: Sequence[str] = ()
) -> Tokenizers:
    """Train tokenizers on the lines of both sides, or load the models that the configuration names.

    `tags` are the language tags that source lines may start with: they become symbols that are never split. Raises
    UserError, for example for an impossible vocab_size.
    """
    if isinstance(config, schema.FileTokenizer):
        names = [name for name in (config.source_model, config.target_model) if name is not None]
        models = [Tokenizer.load(user_path(name), config.lowercase) for name in names]
        tokenizers = Tokenizers(models[0], models[-1])
        check_sampling(config, tokenizers)
        return tokenizers
    if isinstance(config, schema.SidesTokenizer):
        return Tokenizers(
            _train(config.source, config.lowercase, source, tags, "tokenizer.source"),
            _train(config.target, config.lowercase, target, (), "tokenizer.target"),
        )
    shared = _train(config, config.lowercase, chain(source, target), tags, "tokenizer")
    return Tokenizers(shared, shared)


def check_sampling(config: schema.FileTokenizer, tokenizers: Tokenizers) -> None:
    """Raise UserError if the configuration samples segmentations from a model that does not support it."""
    names = config.source_model, config.target_model or config.source_model
    for alpha, name, tokenizer in zip(config.sampling_by_side, names, tokenizers, strict=True):
        if alpha and not tokenizer.can_sample():
            raise UserError(f"tokenizer.sampling={alpha}: {name} is not a bpe model without unused pieces; set it to 0")


def _train(
    config: schema.TokenizerSide, lowercase: bool, lines: Iterable[str], tags: Sequence[str], key: str
) -> Tokenizer:
    """Train a tokenizer. `key` names the section of the configuration in messages."""
    model = io.BytesIO()
    symbols: dict[str, Any] = {"user_defined_symbols": [f"{WORD_START}{tag}" for tag in tags]} if tags else {}
    form = config.normalization
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(clean(line, form, lowercase).replace(RESERVED, " ") for line in lines),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            hard_vocab_limit=config.kind in {"bpe", "unigram"},
            byte_fallback=config.byte_fallback,
            character_coverage=config.character_coverage,
            split_by_unicode_script=config.split_punctuation,
            normalization_rule_name="identity",
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            max_sentence_length=LONGEST_LINE,
            minloglevel=2,
            **symbols,
        )
    except RuntimeError as error:
        raise UserError(_explanation(str(error), config, key)) from None
    proto = _proto(model.getvalue())
    proto.normalizer_spec.name = form
    return Tokenizer(proto.SerializeToString(), lowercase)


def _explanation(message: str, config: schema.TokenizerSide, key: str) -> str:
    """Turn SentencePiece's error message into advice to the user."""
    size = f"{key}.vocab_size"
    setting = f"{size}={config.vocab_size}"
    if limit := re.search(r"value <= (\d+)", message):
        return f"{setting}: the training corpus allows at most {limit[1]}; set {size}={limit[1]} or less"
    if limit := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"{setting}: the training corpus has more characters; set {size}={int(limit[1]) + 1} or more, or "
            f"{key}.character_coverage below 1.0"
        )
    if "(vocab_size) >= (0)" in message:
        return f"{setting}: {key}.byte_fallback takes 256 pieces; set {size}={256 + EOS + 2} or more"
    if "(all_chars_count) > (0)" in message or "!sentences_.empty()" in message:
        return (
            f"data.train: no line can train a tokenizer: each is empty with {key}.normalization="
            f"{config.normalization}, or has more than {LONGEST_LINE:,} bytes; write one sentence per line"
        )
    return f"{key}: SentencePiece could not be trained ({message.strip().splitlines()[-1]})"
