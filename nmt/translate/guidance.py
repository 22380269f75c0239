"""What a user decides in translations, besides the search: first tokens, phrases that must or must not appear, where
steps attend to.

`make_guidance` turns the user's text into tokens, which the search follows.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypedDict
from unicodedata import category, normalize

from nmt.config.errors import UserError, format_value
from nmt.data.tokenizer import Tokenizer
from nmt.translate.phrases import Forbidden, occurrences
from nmt.translate.search import Attend, Guidance

if TYPE_CHECKING:
    from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
ROUNDING = 1e-3  # of weights that sum to 1
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
    translator: "Translator",
    lines: Sequence[str],
    sources: Sequence[list[int]],
    controls: Controls,
    first_line: int = 1,
) -> Guidance:
    """Return the guidance for the translation of these lines, given with their tokens.

    Warnings number the lines from `first_line`. Raises UserError for controls that this search or model cannot respect
    in any line.
    """
    guidance = steer(translator, [source for source in sources if len(source) > 1], controls.get("attend"))
    if not controls.keys() - {"attend"}:
        return guidance
    _check(controls, len(lines), translator)
    tokenizers, forbidden = translator.tokenizers, None
    if phrases := controls.get("forbidden"):
        forbidden = _forbidden(tokenizers.target, tuple(phrases))
    wanted = [_counted(phrases) for phrases in controls.get("constraints") or [[]] * len(lines)]
    if pairs := controls.get("glossary"):
        glossary = _glossary(tuple(pairs.items()), tokenizers.source.lowercase)
        # A phrase of both, the constraints and the glossary, counts as one.
        wanted = [counts | _counted(glossary.targets(line)) for counts, line in zip(wanted, lines, strict=True)]
    starts: Sequence[str | Sequence[str]] = controls.get("prefixes") or [controls.get("prefix", "")] * len(lines)
    prefixes, constraints = [], []
    for number, (source, start, counts) in enumerate(zip(sources, starts, wanted, strict=True), first_line):
        prefix, encoded, problems = _encode(translator, source, start, counts, forbidden)
        prefixes.append(prefix)
        constraints.append(encoded)
        if problems:
            log.warning("line %d: translated without %s", number, "; without ".join(problems))
    return guidance._replace(
        prefixes=prefixes if any(prefixes) else (),
        constraints=constraints if any(constraints) else (),
        forbidden=forbidden,
    )


def _check(controls: Controls, lines: int, translator: "Translator") -> None:
    """Raise an error for controls of a wrong form, or that the search ignores."""
    method, constraints, prefix = translator.method, controls.get("constraints") or [], controls.get("prefix", "")
    if (any(constraints) or controls.get("glossary")) and not method.takes_constraints:
        raise UserError(
            f"constraints and glossary need search=beam, but this search is {method.settings.kind}; use search=beam"
        )
    if any(isinstance(phrases, str) for phrases in (controls.get("forbidden"), constraints, *constraints)):
        raise TypeError("constraints and forbidden: a list of phrases is expected, not a string")
    for key, values in (("constraints", controls.get("constraints")), ("prefixes", controls.get("prefixes"))):
        if values is not None and len(values) != lines:
            raise UserError(f"{key}: {len(values)} for {lines} lines; give one for each line")
    if prefix and controls.get("prefixes") is not None:
        raise UserError("prefix starts all translations, and prefixes each of them; give only one of the two")
    target = translator.tokenizers.target
    if isinstance(prefix, str) and target.unk in prefix_tokens(target, prefix):
        raise UserError(f"prefix: {_quoted(prefix)} holds characters that the tokenizer does not know")


def _encode(
    translator: "Translator",
    source: Sequence[int],
    start: str | Sequence[str],
    phrases: Mapping[str, int],
    forbidden: Forbidden | None,
) -> tuple[list[int], list[list[int]], list[str]]:
    """Encode a line's prefix and its constraints, each as often as it must appear; what is impossible is left out, and
    its reason returned."""
    target, limit = translator.tokenizers.target, translator.limit(len(source))
    if len(source) == 1:
        return [], [], ["its prefix and constraints, as the line is empty"] if start or phrases else []
    prefix, problems = prefix_tokens(target, start), []
    # Pieces of a translation may hold <unk>.
    if prefix and isinstance(start, str) and (problem := _problem(prefix, target, forbidden)):
        prefix, problems = [], [f"its prefix {_quoted(start)}, which {problem}"]
    room, constraints = max(0, limit - len(prefix) - 1), []
    for phrase, times in phrases.items():
        tokens = target.encode([phrase])[0][:-1]
        if problem := _problem(tokens, target, forbidden):
            problems.append(f"{_quoted(phrase)}, which {problem}")
            continue
        needed = len(tokens) * max(0, times - occurrences(prefix, tokens, translator.boundary))
        if needed > room:
            after = " after its prefix" if prefix else ""
            reason = f"for which the limit of {limit} tokens (search.max_length, search.max_ratio) leaves no room"
            problems.append(f"{_quoted(phrase)}, {reason}{after}")
            continue
        room -= needed
        constraints += [tokens] * times
    return prefix, constraints, problems


def _problem(tokens: Sequence[int], target: Tokenizer, forbidden: Forbidden | None) -> str | None:
    """Say why no translation can contain these tokens; None if it can."""
    if not tokens:
        return "is empty"
    if target.unk in tokens:
        return "holds characters that the tokenizer does not know"
    return "holds a forbidden phrase" if forbidden is not None and forbidden.contained(tokens) else None


def _counted(phrases: Iterable[str]) -> Counter[str]:
    return Counter(" ".join(phrase.split()) for phrase in phrases)


def steer(translator: "Translator", sources: Sequence[list[int]], attend: Attend | None) -> Guidance:
    """Return the guidance that steers the attention to these sources, given as tokens. Raises UserError if that is
    impossible."""
    if not attend:
        return Guidance()
    if not translator.model.attends:
        raise UserError("attend: the run has no attention to steer")
    for source in sources:
        _check_attend(attend, len(source))
    return Guidance(attend=attend)


def _check_attend(attend: Attend, length: int) -> None:
    """Raise UserError unless these steps can be steered in a source sentence of this many tokens."""
    for step, target in attend.items():
        if step < 0:
            raise UserError(f"attend: step {step} does not exist; steps count from 0")
        if isinstance(target, int):
            if not 0 <= target < length:
                raise UserError(
                    f"attend: step {step} attends to position {target}, but the source has positions 0 to {length - 1}"
                )
            continue
        if len(target) != length:
            raise UserError(f"attend: step {step} has {len(target)} weights for {length} source tokens")
        total = sum(target)
        if not all(weight >= 0 for weight in target) or not math.isfinite(total) or total > 1 + ROUNDING:
            raise UserError(f"attend: the weights of step {step} must not be negative, nor sum to more than 1")


def warn_of_unmet(
    translator: "Translator", guidance: Guidance, pieces: Sequence[Sequence[str]], first_line: int = 1
) -> None:
    """Warn of each translation, given as pieces, that lacks phrases although the search was to meet them."""
    target = translator.tokenizers.target
    for number, (of_line, phrases) in enumerate(zip(pieces, guidance.constraints, strict=True), first_line):
        tokens = [token for token in map(target.id_of, of_line) if token is not None]
        counted = Counter(map(tuple, phrases))
        unmet = [phrase for phrase, n in counted.items() if occurrences(tokens, phrase, translator.boundary) < n]
        if unmet:
            log.warning(
                "line %d: nothing found with %s up to the limit of the length; raise search.max_length or "
                "search.max_ratio, or forbid less",
                number,
                ", ".join(_quoted(target.decode(phrase)) for phrase in unmet),
            )


def prefix_tokens(tokenizer: Tokenizer, prefix: str | Sequence[str], field: str = "prefix") -> list[int]:
    """Encode a text, or pieces as in Translation.tokens, without </s>. Raises UserError for an unknown piece, which
    names the field."""
    if isinstance(prefix, str):
        (tokens,) = tokenizer.encode([prefix])
        return tokens[:-1]
    if unknown := [piece for piece in prefix if tokenizer.id_of(piece) is None]:
        raise UserError(f"{field}: {unknown[0]!r} is no piece of the target tokenizer")
    return [token for piece in prefix if (token := tokenizer.id_of(piece)) is not None]


class Glossary:
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
    """Return "w" for a letter, digit or mark, "-" for a hyphen, " " for white space, and "." for anything else."""
    if character in HYPHENS:
        return "-"
    if character.isalnum() or character in JOINERS or category(character).startswith("M"):
        return "w"
    return " " if character.isspace() else "."


@lru_cache(maxsize=4)
def _glossary(pairs: tuple[tuple[str, str], ...], lowercase: bool) -> Glossary:
    """Cached for the next lines."""
    return Glossary(pairs, lowercase)


@lru_cache(maxsize=4)
def _forbidden(tokenizer: Tokenizer, phrases: tuple[str, ...]) -> Forbidden:
    """Cached for the next lines. A phrase with a character that the tokenizer does not know appears nowhere."""
    encoded = [tokens[:-1] for tokens in tokenizer.encode(phrases)]
    spelled = ["".join(tokenizer.pieces(tokens)) for tokens in encoded if tokenizer.unk not in tokens]
    return Forbidden.spelled(spelled, tokenizer.id_of)


def _quoted(phrase: str) -> str:
    return f"'{format_value(phrase)}'"
