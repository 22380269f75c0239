"""What a SentencePiece model holds, read from its bytes: the Python API tells neither its kind nor a piece's type.

The format is sentencepiece_model.proto. Its classes come with SentencePiece, but load with some versions of protobuf only.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

UNIGRAM, BPE = 1, 2  # kinds of models
NORMAL, UNKNOWN, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 5, 6  # types of pieces


class Piece(NamedTuple):
    """The id of a piece is its place in the model."""

    text: str
    score: float = 0.0
    type: int = NORMAL


class Model(NamedTuple):
    """A model's kind and pieces."""

    kind: int
    pieces: list[Piece]


def read(model: bytes) -> Model:
    """The bytes must be a model that SentencePiece has loaded."""
    kind, pieces = UNIGRAM, []
    for number, value in _fields(model):
        if number == 1:
            pieces.append(_piece(value))
        elif number == 2:
            kind = dict(_fields(value)).get(3, kind)
    return Model(kind, pieces)


def _piece(message: bytes) -> Piece:
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    text = fields[1].decode("utf-8", "surrogateescape")  # what is no UTF-8 stands in no line
    return Piece(text, score, fields.get(3, NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, "int | bytes"]]:
    """Numbers and values of a protobuf message: integers as such, all else as bytes."""
    at = 0
    while at < len(message):
        key, at = _integer(message, at)
        wire = key & 7
        size = {1: 8, 5: 4}.get(wire, 0)
        if wire in {0, 2}:
            size, at = _integer(message, at)
        if wire == 0:
            yield key >> 3, size
        else:
            yield key >> 3, message[at : at + size]
            at += size


def _integer(message: bytes, at: int) -> tuple[int, int]:
    """A varint (seven bits a byte, the lowest first) and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
