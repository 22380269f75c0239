"""Aligned phrases and parts of speech of the demo corpus, with their inflection and French spelling."""

import functools
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple, Self

Links = tuple[tuple[int, int], ...]

# Forms before a vowel or a mute h. The corpus has no aspirated h.
BEFORE_VOWEL = {
    "le": "l'", "la": "l'", "ne": "n'", "de": "d'", "que": "qu'", "ce": "cet", "ma": "mon", "sa": "son",
}  # fmt: skip
CONTRACTIONS = {("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux"}
IRREGULAR_PLURALS = {"man": "men", "woman": "women", "child": "children", "mouse": "mice"}


class Phrase(NamedTuple):
    """Words of both sides, links (English index, French index), and the features with which French words agree."""

    english: tuple[str, ...]
    french: tuple[str, ...]
    links: Links
    feminine: bool = False
    plural: bool = False


def parse_links(pharaoh: str) -> Links:
    """ "0-0 1-2" -> ((0, 0), (1, 2))."""
    return tuple((int(i), int(j)) for i, j in (link.split("-") for link in pharaoh.split()))


@functools.cache
def phrase(english: str, french: str, links: str = "0-0", feminine: bool = False) -> Phrase:
    return Phrase(tuple(english.split()), tuple(french.split()), parse_links(links), feminine)


def join(phrases: Sequence[Phrase], order: Sequence[int] | None = None) -> Phrase:
    """Concatenate phrases: the English words in this order, the French ones in `order` (default: the same)."""
    starts = [0]
    for part in phrases:
        starts.append(starts[-1] + len(part.english))
    french: list[str] = []
    links: list[tuple[int, int]] = []
    for index in order or range(len(phrases)):
        links += [(starts[index] + i, len(french) + j) for i, j in phrases[index].links]
        french += phrases[index].french
    return Phrase(tuple(word for part in phrases for word in part.english), tuple(french), tuple(links))


def starts_with_vowel(french: str) -> bool:
    return unicodedata.normalize("NFD", french[0])[0].lower() in "aeiouhœ"


def spell(sentence: Phrase) -> Phrase:
    """Apply French elision ("le" before a vowel -> "l'") and contraction ("de le" -> "du")."""
    words: list[str] = []
    positions: list[int] = []  # in `words`, of each original word
    for word, following in zip(sentence.french, (*sentence.french[1:], "."), strict=True):
        spelled = BEFORE_VOWEL.get(word, word) if starts_with_vowel(following) else word
        if words and (words[-1], spelled) in CONTRACTIONS:
            words[-1] = CONTRACTIONS[words[-1], spelled]
        else:
            words.append(spelled)
        positions.append(len(words) - 1)
    links = tuple(sorted({(i, positions[j]) for i, j in sentence.links}))
    return sentence._replace(french=tuple(words), links=links)


class Noun(NamedTuple):
    """Parsed from "cat chat m"."""

    english: tuple[str, str]  # singular, plural
    french: tuple[str, str]
    feminine: bool

    @classmethod
    def parse(cls, entry: str) -> Self:
        english, french, gender = entry.split()
        return cls((english, english_plural(english)), (french, french_plural(french)), gender == "f")


class Adjective(NamedTuple):
    order: str  # size (before the French noun), quality or origin (after it)
    kinds: tuple[str, ...]  # of nouns it may describe
    english: str
    masculine: str
    feminine: str
    before_vowel: str  # masculine singular: "vieil homme"

    @classmethod
    def parse(cls, order: str, kinds: str, forms: str) -> Self:
        english, masculine, feminine, *before_vowel = forms.split()
        return cls(order, tuple(kinds.split()), english, masculine, feminine, *(before_vowel or [masculine]))

    def agreeing(self, head: Phrase) -> Phrase:
        """The form that agrees with the noun phrase `head`."""
        if not (head.feminine or head.plural) and starts_with_vowel(head.french[0]):
            return phrase(self.english, self.before_vowel)
        return phrase(self.english, agree(self.masculine, self.feminine, head.feminine, head.plural))


class Determiner(NamedTuple):
    weight: int
    plural: bool
    roles: tuple[str, ...]
    english: str
    masculine: str
    feminine: str

    @classmethod
    def parse(cls, weight: str, number: str, roles: str, forms: str) -> Self:
        return cls(int(weight), number == "plural", tuple(roles.split()), *forms.split("/"))

    def agreeing(self, head: Phrase, before_adjective: bool) -> Phrase:
        """The form that agrees with the noun phrase `head`."""
        french = self.feminine if head.feminine else self.masculine
        if french == "des" and before_adjective:
            french = "de"  # "de petits chats"
        return phrase(self.english, french, "0-0 0-1" if " " in french else "0-0")


class Verb(NamedTuple):
    english: tuple[str, ...]  # base, third person singular, past
    french: tuple[str, ...]  # present singular, present plural, participle, infinitive, future singular
    takes: tuple[str, ...]  # kinds of objects, or groups of prepositions
    etre: bool  # whether its past takes "être", so that the participle agrees with the subject

    @classmethod
    def parse(cls, english: str, french: str, takes: str, auxiliary: str = "avoir") -> Self:
        forms = tuple(english.split()), tuple(french.split())
        return cls(*forms, tuple(takes.split()), auxiliary == "être")


class VerbGroup(NamedTuple):
    """Templates of both sides, whose fields are forms of a verb."""

    weight: int
    tense: str
    english: str
    french: str
    links: Links

    @classmethod
    def parse(cls, weight: str, tense: str, english: str, french: str, links: str) -> Self:
        return cls(int(weight), tense, english, french, parse_links(links))

    @property
    def negated(self) -> bool:
        return self.french.startswith("ne ")


def english_plural(noun: str) -> str:
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def french_plural(word: str) -> str:
    if word.endswith(("s", "x", "z")):
        return word
    if word.endswith("al"):
        return word[:-1] + "ux"
    return word + ("x" if word.endswith("eau") else "s")


def agree(masculine: str, feminine: str, is_feminine: bool, is_plural: bool) -> str:
    word = feminine if is_feminine else masculine
    return french_plural(word) if is_plural else word


def inflect(verb: Verb, feminine: bool, plural: bool) -> tuple[dict[str, str], dict[str, str]]:
    """English and French fields of a `VerbGroup`, for a subject in the third person."""
    base, third, past = verb.english
    singular, plural_form, participle, infinitive, future = verb.french
    if verb.etre:
        participle = agree(participle, participle + "e", feminine, plural)
    english, french = {"base": base, "past": past}, {"infinitive": infinitive, "participle": participle}
    if plural:
        english |= {"present": base, "do": "do", "want": "want"}
        french |= {"present": plural_form, "future": future[:-1] + "ont", "auxiliary": "sont" if verb.etre else "ont"}
        french |= {"can": "peuvent", "must": "doivent", "want": "veulent"}
    else:
        english |= {"present": third, "do": "does", "want": "wants"}
        french |= {"present": singular, "future": future, "auxiliary": "est" if verb.etre else "a"}
        french |= {"can": "peut", "must": "doit", "want": "veut"}
    return english, french
