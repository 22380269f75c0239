"""What a user controls in translations besides the search: how they start, which phrases must or must not appear, and
where each step attends. A `Guide` turns the user's text into tokens for the search."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypedDict
from unicodedata import normalize

import numpy as np

from nmt.config.errors import UserError, format_value, nearest
from nmt.data.tokenizer import Tokenizer, Tokenizers, join
from nmt.translate.constraints import occurrences
from nmt.translate.forbidden import Forbidden, kind_of
from nmt.translate.search import Attend, Guidance, Search, max_tokens

log = logging.getLogger(__name__)
ROUNDING = 1e-3  # the user's attention weights of a step may sum to at most 1 plus this
# Matches a word or a lone sign, in a string with the `kind_of` of each character.
WORDS = re.compile("w+(?:-w+)*|[-.c]")


class Controls(TypedDict, total=False):
    """What a user may control in translations, in addition to the search settings. A phrase is one or several whole
    words, such as "le chien", spelled as in the middle of a sentence. If the translation of a line cannot contain a
    prefix or a phrase, that prefix or phrase is left out for this line, with a warning."""

    attend: Attend | None
    """Step -> the source position that has attention weight 1, or the weights of all positions. Steps and positions
    count from 0. The other steps of each translation attend as usual."""
    prefix: str | Sequence[str]
    """The text, or the pieces, that each translation starts with. Characters that the tokenizer does not know are an
    error."""
    prefixes: Sequence[str]
    """For each line, the text that its translation starts with; in place of `prefix`."""
    constraints: Sequence[Sequence[str]]
    """For each line, the phrases that must appear in its translation. A phrase that is listed twice must appear twice.
    """
    glossary: Mapping[str, str]
    """Source phrase -> its required translation, which must appear at least as often as the source phrase occurs in
    the line. Of source phrases that overlap, the first one counts; of those that start together, the longest one."""
    forbidden: Sequence[str]
    """Phrases that must not appear in any translation, neither after a space nor after a sign such as "(". A longer
    word is also forbidden if its first pieces spell the phrase."""


@dataclass(frozen=True)
class Guide:
    """Encodes the controls of lines for a search method and a model."""

    tokenizers: Tokenizers
    method: Search[Any]
    attends: bool  # whether the model has an attention, which can be steered

    def make(
        self, lines: Sequence[str], sources: Sequence[list[int]], controls: Controls, first_line: int = 1
    ) -> Guidance:
        """Encode the controls of these lines, whose tokens are `sources`. Raises UserError for controls that are wrong
        or that the search method or the model does not support, and TypeError for a string in place of a list."""
        for name in controls.keys() - Controls.__annotations__.keys():
            hint = (
                nearest(name, Controls.__annotations__) or "; search settings belong to Translator.load(search={...})"
            )
            raise UserError(f"{name}: unknown argument of a translation{hint}")
        for name in ("attend", "glossary"):
            if not isinstance(value := controls.get(name) or {}, Mapping):
                raise TypeError(f"{name}: a dictionary is expected, not {type(value).__name__}")
        guidance = self.steer([source for source in sources if len(source) > 1], controls.get("attend"))
        if not controls.keys() - {"attend"}:
            return guidance
        self._check(controls, len(lines))
        source_tokenizer, target = self.tokenizers
        phrases = controls.get("forbidden")
        forbidden = _forbidden(target, tuple(phrases)) if phrases else None
        wanted = [_counted(phrases, target) for phrases in controls.get("constraints") or [[]] * len(lines)]
        if pairs := controls.get("glossary"):
            glossary = _glossary(tuple(pairs.items()), source_tokenizer.lowercase)
            # If constraints and glossary both name a phrase, the larger of its two counts holds.
            wanted = [
                counts | _counted(glossary.targets(self._text_of(line, source)), target)
                for counts, line, source in zip(wanted, lines, sources, strict=True)
            ]
        given: Sequence[str | Sequence[str]] = controls.get("prefixes") or [controls.get("prefix") or ""] * len(lines)
        prefixes, constraints = [], []
        for number, (source, prefix, counts) in enumerate(zip(sources, given, wanted, strict=True), first_line):
            prefix_ids, constraint_ids, problems = self._encode(source, prefix, counts, forbidden)
            prefixes.append(prefix_ids)
            constraints.append(constraint_ids)
            if problems:
                log.warning("line %d: translated without %s", number, "; without ".join(problems))
        return guidance._replace(
            prefixes=prefixes if any(prefixes) else (),
            constraints=constraints if any(constraints) else (),
            forbidden=forbidden,
            boundary=target.boundary,
        )

    def _check(self, controls: Controls, lines: int) -> None:
        """Raise UserError or TypeError for controls that are wrong or that the search method does not support."""
        method, constraints, prefix = self.method, controls.get("constraints") or [], controls.get("prefix") or ""
        if (any(constraints) or controls.get("glossary")) and not method.takes_constraints:
            raise UserError(f"constraints and glossary need search=beam, but this search is {method.settings.kind}")
        if any(isinstance(phrases, str) for phrases in (controls.get("forbidden"), constraints, *constraints)):
            raise TypeError("constraints and forbidden: a list of phrases is expected, not a string")
        for key in ("constraints", "prefixes"):
            values: Any = controls.get(key)
            if values is not None and len(values) != lines:
                raise UserError(f"{key}: one for each line is expected, {lines} in all, not {len(values)}")
        if prefix and controls.get("prefixes") is not None:
            raise UserError("prefix starts all translations, and prefixes each of them; give only one of the two")
        target = self.tokenizers.target
        if isinstance(prefix, str) and target.unk in prefix_tokens(target, prefix):
            raise UserError(f"prefix: {_quoted(prefix)} holds characters that the tokenizer does not know")

    def _encode(
        self,
        source: Sequence[int],
        prefix: str | Sequence[str],
        phrases: Mapping["Phrase", int],
        forbidden: Forbidden | None,
    ) -> tuple[list[int], list[list[int]], list[str]]:
        """Encode a line's prefix and its constraints, each listed as often as it must appear. An impossible one is left
        out, and the third result, a list of messages, says why."""
        target, limit = self.tokenizers.target, max_tokens(self.method.settings, len(source))
        if len(source) == 1:
            return [], [], ["its prefix and constraints, as the line is empty"] if prefix or phrases else []
        prefix_ids, problems = prefix_tokens(target, prefix), []
        # A prefix of pieces is not checked: it may come from another translation, with <unk>.
        if prefix_ids and isinstance(prefix, str) and (problem := _problem(prefix_ids, target, forbidden)):
            prefix_ids, problems = [], [f"its prefix {_quoted(prefix)}, which {problem}"]
        room, constraints = max(0, limit - len(prefix_ids) - 1), []
        for phrase, times in phrases.items():
            tokens = list(phrase.tokens)
            if problem := _problem(tokens, target, forbidden):
                problems.append(f"{_quoted(phrase.text)}, which {problem}")
            elif (needed := len(tokens) * max(0, times - occurrences(prefix_ids, tokens, target.boundary))) > room:
                reason = f"for which a length of at most {limit} (search.max_length, search.max_ratio) leaves no room"
                problems.append(f"{_quoted(phrase.text)}, {reason}{' after its prefix' if prefix_ids else ''}")
            else:
                room -= needed
                constraints += [tokens] * times
        return prefix_ids, constraints, problems

    def _text_of(self, line: str, source: Sequence[int]) -> str:
        """Return the part of a line that the model reads: what its tokens `source` hold, without what was cut off."""
        if len(source) < self.method.settings.max_source_length:
            return line
        return join(self.tokenizers.source.surfaces([line])[0][: len(source) - 1])

    def steer(self, sources: Sequence[list[int]], attend: Attend | None) -> Guidance:
        """Return the guidance that steers the attention in translations of these sources. Raises UserError if the model
        has no attention or `attend` does not fit a source."""
        if not attend:
            return Guidance()
        if not self.attends:
            raise UserError("attend: the run has no attention to steer")
        for step, target in attend.items():
            if step < 0:
                raise UserError(f"attend: step {step} does not exist; steps count from 0")
            for length in map(len, sources):
                if isinstance(target, int | np.integer):
                    if not 0 <= target < length:
                        last = f"but the source has positions 0 to {length - 1}"
                        raise UserError(f"attend: step {step} attends to position {target}, {last}")
                elif len(target) != length:
                    needed = f"needs a weight for each source token, {length} in all, not {len(target)}"
                    raise UserError(f"attend: step {step} {needed}")
                elif not (all(weight >= 0 for weight in target) and sum(target) <= 1 + ROUNDING):
                    raise UserError(f"attend: the weights of step {step} must not be negative, nor sum to more than 1")
        return Guidance(attend=attend)

    def warn_of_unmet(self, guidance: Guidance, pieces: Sequence[Sequence[str]], first_line: int = 1) -> None:
        """Warn of each translation, given as pieces, in which the search has not met all constraints."""
        target = self.tokenizers.target
        for number, (of_line, phrases) in enumerate(zip(pieces, guidance.constraints, strict=True), first_line):
            tokens = [token for token in map(target.id_of, of_line) if token is not None]
            counted = Counter(map(tuple, phrases))
            unmet = [phrase for phrase, n in counted.items() if occurrences(tokens, phrase, target.boundary) < n]
            if unmet:
                log.warning(
                    "line %d: nothing found with %s up to the limit of the length; raise search.max_length or "
                    "search.max_ratio, or forbid less",
                    number,
                    ", ".join(_quoted(target.decode(phrase)) for phrase in unmet),
                )


def _problem(tokens: Sequence[int], target: Tokenizer, forbidden: Forbidden | None) -> str | None:
    """Say why no translation can contain these tokens; None if a translation can."""
    if not tokens:
        return "is empty"
    if target.unk in tokens:
        return "holds characters that the tokenizer does not know"
    return "holds a forbidden phrase" if forbidden is not None and forbidden.contained(tokens) else None


@dataclass(frozen=True)
class Phrase:
    """A constraint. Spellings with the same tokens, such as "Chien" and "chien" in lower case, are the same phrase."""

    tokens: tuple[int, ...]
    text: str = field(compare=False)


def _counted(phrases: Iterable[str], target: Tokenizer) -> Counter[Phrase]:
    """Encode phrases, and count how often each is listed."""
    texts = [" ".join(phrase.split()) for phrase in phrases]
    return Counter(Phrase(tuple(target.encode_phrase(text)), text) for text in texts)


def prefix_tokens(tokenizer: Tokenizer, prefix: str | Sequence[str], field: str = "prefix") -> list[int]:
    """Encode a text, or pieces as in Translation.tokens, without </s>. Raises UserError, which names `field`, for a
    piece that the tokenizer does not have."""
    if isinstance(prefix, str):
        (tokens,) = tokenizer.encode([prefix])
        return tokens[:-1]
    if unknown := [piece for piece in prefix if tokenizer.id_of(piece) is None]:
        raise UserError(f"{field}: {unknown[0]!r} is no piece of the target tokenizer")
    return [token for piece in prefix if (token := tokenizer.id_of(piece)) is not None]


class Glossary:
    """Finds source phrases in lines, by whole words."""

    def __init__(self, pairs: Sequence[tuple[str, str]], lowercase: bool) -> None:
        self._lowercase = lowercase
        self._targets = {tuple(self._words(source)): target for source, target in pairs}
        self._longest = max(map(len, self._targets), default=0)

    def _words(self, text: str) -> list[str]:
        text = normalize("NFC", text.lower() if self._lowercase else text)
        return [text[slice(*match.span())] for match in WORDS.finditer("".join(map(kind_of, text)))]

    def targets(self, line: str) -> Iterator[str]:
        """Yield a phrase that must appear in the line's translation, for each source phrase in the line."""
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


_glossary = lru_cache(maxsize=4)(Glossary)  # once for all calls with the same pairs


@lru_cache(maxsize=4)
def _forbidden(tokenizer: Tokenizer, phrases: tuple[str, ...]) -> Forbidden:
    """Make the automaton of forbidden phrases, once for all calls with the same phrases. No translation can contain a
    phrase with an unknown character, so it is left out."""
    encoded = [tokenizer.encode_phrase(phrase) for phrase in phrases]
    spelled = ["".join(tokenizer.pieces(tokens)) for tokens in encoded if tokenizer.unk not in tokens]
    return Forbidden(spelled, tokenizer.vocabulary())


def _quoted(phrase: str) -> str:
    return f"'{format_value(phrase)}'"
