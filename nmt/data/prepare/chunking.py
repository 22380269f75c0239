"""The pairs of a source in chunks, which worker processes read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nmt.data.reading.language_tags import Tags
from nmt.data.reading.sources import CHARACTERS, CHUNK, Concatenation, Directed, Pair, TextChunk, TextFiles


@dataclass(frozen=True)
class DirectedChunk:
    """A chunk of one of several corpora, its sources still without tags."""

    pairs: "TextChunk | list[Pair]"
    corpus: int  # its number, from 0
    tags: Tags
    mark: str

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def tagged(self, source: str, target: str) -> tuple[str, str]:
        """A pair with its tags."""
        return self.tags.add(self.mark, source), self.tags.protect(target)


Chunk = TextChunk | list[Pair] | DirectedChunk


def chunks(pairs: Iterable[Pair]) -> Iterator[Chunk]:
    """The pairs of a source in chunks that depend on the source alone."""
    if isinstance(pairs, TextFiles):
        yield from pairs.chunks()
    elif isinstance(pairs, Concatenation):
        for part in pairs.parts:
            yield from chunks(part)
    elif isinstance(pairs, Directed):
        for inner in chunks(pairs.pairs):
            assert not isinstance(inner, DirectedChunk)
            yield DirectedChunk(inner, pairs.corpus, pairs.tags, pairs.mark)
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
