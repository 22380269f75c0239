"""What a SentencePiece model holds, read from its bytes: the Python API tells neither its kind nor all types of pieces.

The format is sentencepiece_model.proto (protobuf). SentencePiece brings classes for it, but some versions of protobuf
refuse to load them.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

UNIGRAM, BPE = 1, 2  # kinds of models
NORMAL, UNKNOWN, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 5, 6  # types of pieces

PIECES, TRAINER = 1, 2  # numbers of a model's fields ...
TEXT, SCORE, TYPE = 1, 2, 3  # ... of a piece's ...
KIND = 3  # ... and of the trainer's
MORE = 0x80  # the bit that says that an integer goes on


class Piece(NamedTuple):
    """Its id is its place in the model."""

    text: str
    score: float
    type: int


class Model(NamedTuple):
    """A model's kind and pieces."""

    kind: int
    pieces: list[Piece]


def read(model: bytes) -> Model:
    """The bytes must be a model that SentencePiece has loaded."""
    fields = list(_fields(model))
    kind = next((dict(_fields(value)).get(KIND) for number, value in fields if number == TRAINER), None)
    return Model(kind or UNIGRAM, [_piece(value) for number, value in fields if number == PIECES])


def _piece(message: bytes) -> Piece:
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", fields.get(SCORE, bytes(4)))
    text = fields[TEXT].decode("utf-8", "surrogateescape")  # what is no UTF-8 stands in no line
    return Piece(text, score, fields.get(TYPE, NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields: integers as such, all else as bytes."""
    at = 0
    while at < len(message):
        key, at = _integer(message, at)
        number, form = divmod(key, 8)
        match form:
            case 0:
                value, at = _integer(message, at)
                yield number, value
                continue
            case 2:
                size, at = _integer(message, at)
            case _:
                size = 8 if form == 1 else 4
        yield number, message[at : at + size]
        at += size


def _integer(message: bytes, at: int) -> tuple[int, int]:
    """An integer, seven bits a byte and the lowest first, and where it ends."""
    value = shift = 0
    while message[at] & MORE:
        value |= (message[at] & ~MORE) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
