"""What a user decides in translations, besides the search: first tokens, phrases that must or must not appear, where
steps attend to.

`make_guidance` turns the user's text into tokens, `Guidance`, which the searcher follows. Shapes: B sentences, S source
positions, L steps.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from unicodedata import category, normalize

import numpy as np
import torch

from nmt.attention.steering import Steering
from nmt.config.errors import UserError, format_value
from nmt.data.tokenizer import Tokenizer
from nmt.translate.phrases import Forbidden, occurrences
from nmt.translate.search import Ids, Search

if TYPE_CHECKING:
    from nmt.translate.searcher import Searcher

log = logging.getLogger(__name__)
ROUNDING = 1e-3  # of weights that sum to 1
HYPHENS, JOINERS = "-\u2010\u2011", "_\u200c\u200d"  # join words, and the letters of a word
WORDS = re.compile("w+(?:-w+)*|[-.]")  # in a text of the kinds of characters, see `_kind`

Attend = Mapping[int, int | Sequence[float]]
"""Step from 0 -> the source position to attend to, from 0, or a weight for every position."""


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


class Guidance(NamedTuple):
    """The controls of B sentences in tokens; `attend` and `forbidden` hold for each of them."""

    prefixes: Sequence[Sequence[int]] = ()  # the tokens that each starts with, without </s>; or none at all
    attend: Attend = MappingProxyType({})
    constraints: Sequence[Sequence[Sequence[int]]] = ()  # the phrases that each must contain; or none at all
    forbidden: Forbidden | None = None

    def of(self, indices: Sequence[int]) -> "Guidance":
        """The guidance of these sentences."""
        return self._replace(
            prefixes=[self.prefixes[i] for i in indices] if self.prefixes else (),
            constraints=[self.constraints[i] for i in indices] if self.constraints else (),
        )

    def tokens(self) -> list[int]:
        """All tokens that translations must contain."""
        return [*chain.from_iterable(self.prefixes), *chain.from_iterable(chain.from_iterable(self.constraints))]

    def within(self, shortlist: Ids) -> "Guidance":
        """Replace tokens by their positions in a shortlist, which holds `tokens`."""

        def positions(tokens: Sequence[int]) -> list[int]:
            return [int(position) for position in np.searchsorted(shortlist, tokens)]

        return self._replace(
            prefixes=[positions(prefix) for prefix in self.prefixes],
            constraints=[[positions(phrase) for phrase in phrases] for phrases in self.constraints],
            forbidden=None if self.forbidden is None else self.forbidden.within(shortlist),
        )

    def steering(self, lengths: Sequence[int], device: torch.device) -> Steering | None:
        """Lengths of the B sentences -> Steering of L steps; None if no step is steered."""
        if not self.attend:
            return None
        L, S = max(self.attend) + 1, max(lengths)
        weights, steered = torch.zeros(len(lengths), L, S), torch.zeros(len(lengths), L, dtype=torch.bool)
        for step, target in self.attend.items():
            if isinstance(target, int):
                weights[:, step, target] = 1.0
            else:
                weights[:, step, : len(target)] = torch.tensor(target)
            steered[:, step] = True
        return Steering(weights.to(device), steered.to(device))


def make_guidance(
    searcher: "Searcher",
    lines: Sequence[str],
    sources: Sequence[list[int]],
    controls: Controls,
    first_line: int = 1,
) -> Guidance:
    """Return the guidance for the translation of these lines, given with their tokens.

    Warnings number the lines from `first_line`. Raises UserError for controls that this search or model cannot respect
    in any line.
    """
    steered = steer(searcher, [source for source in sources if len(source) > 1], controls.get("attend"))
    if not controls.keys() - {"attend"}:
        return steered
    _check(controls, len(lines), searcher.method)
    target, lowercase = searcher.tokenizers.target, searcher.tokenizers.source.lowercase
    forbidden, glossary, wanted = None, None, controls.get("constraints")
    if phrases := controls.get("forbidden"):
        forbidden = _forbidden(target, tuple(phrases))
    if pairs := controls.get("glossary"):
        glossary = _glossary(tuple(pairs.items()), lowercase)
    prefix, texts = controls.get("prefix", ""), controls.get("prefixes")
    common = prefix_tokens(target, prefix)
    if isinstance(prefix, str) and target.unk in common:
        raise UserError(f"prefix: {_quoted(prefix)} holds characters that the tokenizer does not know")
    prefixes, constraints = [], []
    for i, (line, source) in enumerate(zip(lines, sources, strict=True)):
        tokens = common if texts is None else prefix_tokens(target, texts[i])
        problem = _problem_of_prefix(tokens, None if texts is None else texts[i], source, target, forbidden)
        problems = [] if problem is None else [problem]
        prefixes.append([] if problem else tokens)
        # A phrase of both, the constraints and the glossary, counts as one.
        counts = _counted([] if wanted is None else wanted[i])
        counts |= _counted([] if glossary is None else list(glossary.targets(line)))
        constraints.append(_constraints(searcher, source, prefixes[-1], counts, forbidden, problems))
        if problems:
            log.warning("line %d: translated without %s", first_line + i, "; without ".join(problems))
    return steered._replace(
        prefixes=prefixes if any(prefixes) else (),
        constraints=constraints if any(constraints) else (),
        forbidden=forbidden,
    )


def steer(searcher: "Searcher", sources: Sequence[list[int]], attend: Attend | None) -> Guidance:
    """Return the guidance that steers the attention to these sources, given as tokens. Raises UserError if that is
    impossible."""
    if not attend:
        return Guidance()
    if not searcher.model.attends:
        raise UserError("attend: the run has no attention to steer")
    for source in sources:
        _check_attend(attend, len(source))
    return Guidance(attend=attend)


def warn_of_unmet(
    searcher: "Searcher", guidance: Guidance, pieces: Sequence[Sequence[str]], first_line: int = 1
) -> None:
    """Warn of each translation, given as pieces, that lacks phrases although the search was to meet them."""
    if not guidance.constraints:
        return
    target = searcher.tokenizers.target
    for number, (of_line, phrases) in enumerate(zip(pieces, guidance.constraints, strict=True), first_line):
        tokens = [token for token in map(target.id_of, of_line) if token is not None]
        counted = Counter(map(tuple, phrases))
        unmet = [phrase for phrase, n in counted.items() if occurrences(tokens, phrase, searcher.boundary) < n]
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


def _check(controls: Controls, lines: int, search: Search[Any]) -> None:
    """Raise an error for controls of a wrong form, or that the search ignores."""
    if (any(controls.get("constraints", ())) or controls.get("glossary")) and not search.takes_constraints:
        raise UserError(
            f"constraints and glossary need search=beam, but this search is {search.settings.kind}; use search=beam"
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


def _problem_of_prefix(
    tokens: Sequence[int], text: str | None, source: Sequence[int], target: Tokenizer, forbidden: Forbidden | None
) -> str | None:
    """Why a line cannot be translated with this prefix; text: None for the prefix of all lines."""
    name = "its prefix" if text is None else f"its prefix {_quoted(text)}"
    if text is not None and target.unk in tokens:
        return f"{name}, which holds characters that the tokenizer does not know"
    if forbidden is not None and forbidden.contained(tokens):
        return f"{name}, which holds a forbidden phrase"
    return f"{name}, as the line is empty" if tokens and len(source) == 1 else None


def _counted(phrases: Sequence[str]) -> Counter[str]:
    return Counter(" ".join(phrase.split()) for phrase in phrases)


def _constraints(
    searcher: "Searcher",
    source: Sequence[int],
    prefix: Sequence[int],
    counts: Mapping[str, int],
    forbidden: Forbidden | None,
    problems: list[str],
) -> list[list[int]]:
    """Encode the phrases of a line that can be met; the reasons of all others go to `problems`."""
    if counts and len(source) == 1:
        problems.append("constraints, as the line is empty")
        return []
    target, limit = searcher.tokenizers.target, searcher.limit(len(source))
    room, encoded = max(0, limit - len(prefix) - 1), []
    for phrase, times in counts.items():
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
            encoded += [tokens] * times
    return encoded


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
