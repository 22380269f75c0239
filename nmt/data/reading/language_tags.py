"""Tags of languages: words in front of a source sentence that say into which language to translate it (Johnson et al.
2017, "Google's multilingual neural machine translation system"), and perhaps which language it is in.

A tag is a user-defined symbol of the tokenizer, so that it is one piece. The same text inside a sentence is no tag.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from nmt.config.errors import UserError, format_value
from nmt.data.reading.text import is_blank

TAG = re.compile(r"<(2?)([a-z][\w.-]*)>")


def target_tag(language: str) -> str:
    """The tag "<2de>" of a target language "de"."""
    return f"<2{language.lower()}>"


def source_tag(language: str) -> str:
    """The tag "<de>" of a source language "de"."""
    return f"<{language.lower()}>"


class Tags:
    """The tags that a model knows; none for a model of one direction."""

    def __init__(self, symbols: Iterable[str] = ()) -> None:
        self.symbols = sorted(symbols)
        found = [match for match in map(TAG.fullmatch, self.symbols) if match]
        self.targets = [match[2] for match in found if match[1]]  # languages, in lower case
        self.sources = [match[2] for match in found if not match[1]]  # the same, if sources have tags too
        alternatives = [f"(?:{'|'.join(map(re.escape, side))})" for side in self._sides() if side]
        self._start = re.compile(f"{' '.join(alternatives)}(?: |$)")
        self._anywhere = re.compile("|".join(map(re.escape, self.symbols)), re.IGNORECASE)

    def __bool__(self) -> bool:
        return bool(self.symbols)

    def _sides(self) -> Iterator[list[str]]:
        yield [source_tag(language) for language in self.sources]
        yield [target_tag(language) for language in self.targets]

    def mark(self, source_lang: str | None, target_lang: str | None) -> str:
        """What stands in front of sentences of this direction: "<2de>" or "<en> <2de>". Raises UserError for a language
        that is missing or unknown."""
        if not self:
            raise UserError("target_lang, source_lang: the model was trained without tags of languages; leave them out")
        if source_lang is not None and not self.sources:
            raise UserError(
                f"source_lang={format_value(source_lang)}: the model has no tags of source languages; leave it out"
            )
        for key, language, known in (
            ("source_lang", source_lang, self.sources),
            ("target_lang", target_lang, self.targets),
        ):
            if known and (language is None or language.lower() not in known):
                raise UserError(f"{key}={format_value(language)}: the model needs one of {', '.join(known)}")
        assert target_lang is not None
        parts = [source_tag(source_lang)] if source_lang is not None else []
        return " ".join([*parts, target_tag(target_lang)])

    def add(self, mark: str, line: str) -> str:
        """A line with its mark in front. An empty line gets none."""
        return f"{mark} {self.protect(line)}" if not is_blank(line) else line

    def protect(self, line: str) -> str:
        """The line without what only looks like a tag: "<2de>" in it becomes "< 2de>"."""
        return self._anywhere.sub(lambda match: f"< {match[0][1:]}", line) if self and "<" in line else line

    def length(self, line: str) -> int:
        """The number of characters of the mark that a line starts with, and of the space after it."""
        match = self._start.match(line) if self else None
        return match.end() if match else 0

    def without(self, line: str) -> str:
        """The line without its mark."""
        return line[self.length(line) :]

    def of_lines(self, lines: Sequence[str], mark: str, first_line: int = 1) -> Sequence[str]:
        """Lines with a mark each, as the model reads them; mark "": those with text start with their own.

        Raises UserError, with the line's number counted from `first_line`, for one without.
        """
        if not self:
            return lines
        if mark:
            return [self.add(mark, line) for line in lines]
        return [self.marked(line, f"line {number}") for number, line in enumerate(lines, first_line)]

    def marked(self, line: str, name: str) -> str:
        """A line that starts with its mark, as `add` would have made it. Raises UserError for text without a mark."""
        if length := self.length(line):
            return line[:length] + self.protect(line[length:])
        if self and not is_blank(line):
            source = f" and source_lang=LANGUAGE ({', '.join(self.sources)})" if self.sources else ""
            raise UserError(
                f"{name}: into which language? give target_lang=LANGUAGE ({', '.join(self.targets)}){source}, or start "
                f"the line with a tag such as {' '.join(side[0] for side in self._sides() if side)}"
            )
        return line

    def count(self, pieces: Sequence[str]) -> int:
        """The number of a source's pieces, in front, that are tags."""
        return sum(piece[1:] in self.symbols for piece in pieces[:2]) if self else 0
