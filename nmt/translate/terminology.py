"""From what a user asks for in text to the guidance of a search: prefixes, constraints, glossary, forbidden phrases."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypedDict
from unicodedata import category, normalize

from nmt.config import schema
from nmt.config.errors import UserError, format_value
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.translate.guidance import Attend, Guidance, check_attend, prefix_tokens
from nmt.translate.search.constrained import occurrences
from nmt.translate.search.forbidden import Forbidden
from nmt.translate.searcher import Searcher

log = logging.getLogger(__name__)
HYPHENS, JOINERS = "-\u2010\u2011", "_\u200c\u200d"  # join words, and the letters of a word
WORDS = re.compile("w+(?:-w+)*|[-.]")  # in a text of the kinds of characters, see `_kind`


class Controls(TypedDict, total=False):
    """What a user may decide in translations, besides the search. Phrases are whole words, and spelled as in the middle
    of a sentence; "le chien" is one phrase. What cannot be met is left out, with a warning for each line."""

    attend: Attend | None
    """At these steps (from 0) of each translation the attention has weight 1 at this source position, or the given
    weights (S,)."""
    prefix: str | Sequence[str]
    """The text, or the pieces, that each translation starts with."""
    prefixes: Sequence[str]
    """The text that each translation starts with, one for each line, in place of `prefix`."""
    constraints: Sequence[Sequence[str]]
    """The phrases that must appear in each translation, one list for each line. A phrase that is listed twice must
    appear twice."""
    glossary: Mapping[str, str]
    """Source phrases, and what must appear in the translation wherever they occur in a line; of two that overlap, the
    first, and of two that start together, the longer one."""
    forbidden: Sequence[str]
    """Phrases that must not appear in any translation, nor at the start of longer words if they are pieces of these."""


def make_guidance(
    searcher: Searcher,
    lines: Sequence[str],
    sources: Sequence[list[int]],
    controls: Controls,
    first_line: int = 1,
) -> Guidance:
    """The guidance for the translation of these lines, given with their tokens.

    Warnings number the lines from `first_line`.

    Raises UserError for controls that this search or model cannot respect in any line.
    """
    steered = steer(searcher, [source for source in sources if len(source) > 1], controls.get("attend"))
    if not controls.keys() - {"attend"}:
        return steered
    _check(controls, len(lines), searcher.settings)
    phrases = tuple(controls.get("forbidden") or ())
    forbidden = _forbidden(searcher.tokenizers.target, phrases) if phrases else None
    problems: list[list[str]] = [[] for _ in lines]
    prefixes = list(_prefixes(searcher, sources, controls, forbidden, problems))
    asked = _asked(searcher.tokenizers, lines, controls)
    constraints = [
        _constraints(searcher, source, prefix, phrases_of_line, forbidden, found)
        for source, prefix, phrases_of_line, found in zip(sources, prefixes, asked, problems, strict=True)
    ]
    for number, found in enumerate(problems, first_line):
        if found:
            log.warning("line %d: translated without %s", number, "; without ".join(found))
    return steered._replace(
        prefixes=prefixes if any(prefixes) else (),
        constraints=constraints if any(constraints) else (),
        forbidden=forbidden,
    )


def steer(searcher: Searcher, sources: Sequence[list[int]], attend: Attend | None) -> Guidance:
    """The attention of these source tokens. Raises UserError if that is impossible."""
    if attend and not searcher.model.attends:
        raise UserError("attend: the run has no attention to steer")
    for source in sources:
        check_attend(attend or {}, len(source))
    return Guidance(attend=attend or {})


def warn_of_unmet(searcher: Searcher, guidance: Guidance, pieces: Sequence[Sequence[str]], first_line: int = 1) -> None:
    """Warn of each translation, given as pieces, that lacks phrases although the search was to meet them."""
    if not guidance.constraints:
        return
    target = searcher.tokenizers.target
    for number, (of_line, phrases) in enumerate(zip(pieces, guidance.constraints, strict=True), first_line):
        tokens = [token for token in map(target.id_of, of_line) if token is not None]
        counted = Counter(map(tuple, phrases))
        unmet = [phrase for phrase, n in counted.items() if occurrences(tokens, phrase, searcher.boundary) < n]
        if unmet:
            named = ", ".join(_quoted(target.decode(phrase)) for phrase in unmet)
            log.warning(
                "line %d: nothing found with %s up to the limit of the length; raise search.max_length or "
                "search.max_ratio, or forbid less",
                number,
                named,
            )


def _check(controls: Controls, lines: int, search: schema.Search) -> None:
    constrained = any(controls.get("constraints", ())) or controls.get("glossary")
    if constrained and not isinstance(search, schema.Beam):
        raise UserError(f"constraints and glossary need search=beam, but this search is {search.kind}; use search=beam")
    if constrained and isinstance(search, schema.Beam) and search.groups > 1:
        raise UserError(
            f"constraints and glossary need one beam, but search.groups={search.groups} divides it; use search.groups=1"
        )
    for key, what in (("constraints", "lists of phrases"), ("prefixes", "prefixes")):
        values = controls.get(key)
        if values is None:
            continue
        if isinstance(values, str) or (key == "constraints" and any(isinstance(value, str) for value in values)):  # type: ignore[attr-defined]
            raise TypeError(f"{key}: one of the {what} for each line is expected, not a string")
        if len(values) != lines:  # type: ignore[arg-type]
            raise UserError(f"{key}: {len(values)} {what} for {lines} lines; give one for each line")  # type: ignore[arg-type]
    if isinstance(controls.get("forbidden"), str):
        raise TypeError("forbidden: a list of phrases is expected, not a string")
    if controls.get("prefix") and controls.get("prefixes") is not None:
        raise UserError("prefix starts all translations, and prefixes each of them; give only one of the two")


def _prefixes(
    searcher: Searcher,
    sources: Sequence[Sequence[int]],
    controls: Controls,
    forbidden: Forbidden | None,
    problems: Sequence[list[str]],
) -> Iterator[list[int]]:
    """The first tokens of each translation."""
    target, texts, prefix = searcher.tokenizers.target, controls.get("prefixes"), controls.get("prefix", "")
    same = prefix_tokens(target, prefix)
    if isinstance(prefix, str) and target.unk in same:
        raise UserError(f"prefix: {_quoted(prefix)} holds characters that the tokenizer does not know")
    for i, (source, found) in enumerate(zip(sources, problems, strict=True)):
        tokens = same if texts is None else prefix_tokens(target, texts[i])
        name = "its prefix" if texts is None else f"its prefix {_quoted(texts[i])}"
        if texts is not None and target.unk in tokens:
            found.append(f"{name}, which holds characters that the tokenizer does not know")
            tokens = []
        if forbidden is not None and forbidden.contained(tokens):
            found.append(f"{name}, which holds a forbidden phrase")
            tokens = []
        if tokens and len(source) == 1:
            found.append(f"{name}, as the line is empty")
            tokens = []
        yield tokens


def _asked(tokenizers: Tokenizers, lines: Sequence[str], controls: Controls) -> Iterator[Counter[str]]:
    """The phrases of each line, by its constraints and by the glossary: a phrase of both counts as one."""
    constraints = controls.get("constraints")
    pairs = tuple((controls.get("glossary") or {}).items())
    glossary = _glossary(pairs, tokenizers.source.lowercase) if pairs else None
    for i, line in enumerate(lines):
        asked = () if constraints is None else constraints[i]
        found = () if glossary is None else glossary.targets(line)
        by_constraints, by_glossary = (Counter(" ".join(phrase.split()) for phrase in each) for each in (asked, found))
        yield by_constraints | by_glossary


def _constraints(
    searcher: Searcher,
    source: Sequence[int],
    prefix: Sequence[int],
    asked: Mapping[str, int],
    forbidden: Forbidden | None,
    problems: list[str],
) -> list[list[int]]:
    """The phrases of a line that can be met, as tokens; the reasons of all others go to `problems`."""
    if asked and len(source) == 1:
        problems.append("constraints, as the line is empty")
        return []
    target, limit = searcher.tokenizers.target, searcher.limit(len(source))
    room, kept = max(0, limit - len(prefix) - 1), []
    for phrase, times in asked.items():
        tokens = target.encode([phrase])[0][:-1]
        if not tokens:
            problems.append(f"{_quoted(phrase)}, which is empty")
        elif target.unk in tokens:
            problems.append(f"{_quoted(phrase)}, which holds characters that the tokenizer does not know")
        elif forbidden is not None and forbidden.contained(tokens):
            problems.append(f"{_quoted(phrase)}, which is or holds a forbidden phrase")
        else:
            needed = len(tokens) * max(0, times - occurrences(prefix, tokens, searcher.boundary))
            if needed > room:
                after = " after its prefix" if prefix else ""
                reason = f"for which the limit of {limit} tokens (search.max_length, search.max_ratio) leaves no room"
                problems.append(f"{_quoted(phrase)}, {reason}{after}")
                continue
            room -= needed
            kept += [tokens] * times
    return kept


class _Glossary:
    """Source phrases by their words."""

    def __init__(self, pairs: Sequence[tuple[str, str]], lowercase: bool) -> None:
        self._lowercase = lowercase
        self._targets = {tuple(self._words(source)): target for source, target in pairs}
        self._longest = max(map(len, self._targets), default=0)

    def _words(self, text: str) -> list[str]:
        text = normalize("NFC", text.lower() if self._lowercase else text)
        return [text[slice(*match.span())] for match in WORDS.finditer("".join(map(_kind, text)))]

    def targets(self, line: str) -> Iterator[str]:
        """What must appear in the line's translation."""
        words, start = self._words(line), 0
        while start < len(words):
            for length in range(min(self._longest, len(words) - start), 0, -1):
                target = self._targets.get(tuple(words[start : start + length]))
                if target is not None:
                    yield target
                    break
            else:
                length = 1
            start += length


def _kind(character: str) -> str:
    """Returns "w" for a letter, digit or mark, "-" for a hyphen, " " for white space, and "." for anything else."""
    if character in HYPHENS:
        return "-"
    if character.isalnum() or character in JOINERS or category(character).startswith("M"):
        return "w"
    return " " if character.isspace() else "."


@lru_cache(maxsize=4)
def _glossary(pairs: tuple[tuple[str, str], ...], lowercase: bool) -> _Glossary:
    """Kept for the next lines."""
    return _Glossary(pairs, lowercase)


@lru_cache(maxsize=4)
def _forbidden(tokenizer: Tokenizer, phrases: tuple[str, ...]) -> Forbidden:
    """Kept for the next lines. A phrase with a character that the tokenizer does not know appears nowhere."""
    encoded = [tokens[:-1] for tokens in tokenizer.encode(phrases)]
    spelled = ["".join(tokenizer.pieces(tokens)) for tokens in encoded if tokenizer.unk not in tokens]
    return Forbidden.spelled(spelled, tokenizer.id_of)


def _quoted(phrase: str) -> str:
    return f"'{format_value(phrase)}'"
