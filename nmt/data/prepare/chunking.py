"""The pairs of a source in chunks, which worker processes read."""

from collections.abc import Iterable, Iterator

from nmt.data.reading.sources import CHARACTERS, CHUNK, Concatenation, Pair, TextChunk, TextFiles

Chunk = TextChunk | list[Pair]


def chunks(pairs: Iterable[Pair]) -> Iterator[Chunk]:
    """The pairs of a source in chunks that depend on the source alone."""
    if isinstance(pairs, TextFiles):
        yield from pairs.chunks()
    elif isinstance(pairs, Concatenation):
        for part in pairs.parts:
            yield from chunks(part)
    else:
        chunk: list[Pair] = []
        size = 0
        for pair in pairs:
            chunk.append(pair)
            size += len(pair.source or "") + len(pair.target or "")
            if len(chunk) == CHUNK or size > CHARACTERS:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk
