"""Make the corpus that comes with the package, nmt/data/demo.tsv.gz, from a synchronous grammar.

    python scripts/make_demo_corpus.py [FILE]

It has English-French sentence pairs with gold word alignments: 500 for testing, 500 for validation, 16,000 to train on.
Published scores refer to this text, so a changed grammar needs another file.

Each rule generates both sides and their links, so the alignment is exact. The French is a function of the English, so
a perfect model reaches 100 BLEU. Spaces separate words, elided French words ("l'", "n'", "qu'") and punctuation; only
names and English nationalities are capitalised. Every word has a link. These words have special links:

- "not" and "never" to both halves of the negation; "does", "did" and "will" to the French finite verb;
- "saw" to auxiliary and participle ("a vu"), "to" to the infinitive, "because" to both words of "parce que";
- "of" and "the" both to a contracted "du"; "many" to both words of "beaucoup de"; "there" to both words of "il y".

The words are in demo_words.yaml.
"""

import functools
import gzip
import random
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import yaml

OUTPUT = Path(__file__).resolve().parents[1] / "nmt" / "data" / "demo.tsv.gz"
PAIRS = 17_000
MIN_WORDS, MAX_WORDS = 4, 45  # limits of an English sentence in words, counting the full stop
CLAUSES, CLAUSE_WEIGHTS = (1, 2, 3, 4), (68, 15, 10, 7)  # numbers of clauses in a sentence, and their frequencies
TENSES = ("present", "past", "future")
ANIMATE = ("person", "animal")
OWNED = ("animal", "document", "object", "place")  # kinds of nouns that can have an owner
WORDS = Path(__file__).with_name("demo_words.yaml")

Links = tuple[tuple[int, int], ...]
# French word -> its form before a vowel or a mute h. The corpus has no aspirated h.
BEFORE_VOWEL = {
    "le": "l'", "la": "l'", "ne": "n'", "de": "d'", "que": "qu'", "ce": "cet", "ma": "mon", "sa": "son",
}  # fmt: skip
CONTRACTIONS = {("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux"}
IRREGULAR_PLURALS = {"man": "men", "woman": "women", "child": "children", "mouse": "mice"}


class Phrase(NamedTuple):
    """An aligned phrase. Links are (English index, French index). `feminine` and `plural` are the gender and number of
    the French phrase. Other French words agree with them."""

    english: tuple[str, ...]
    french: tuple[str, ...]
    links: Links
    feminine: bool = False
    plural: bool = False


def parse_links(pharaoh: str) -> Links:
    """Parse "0-0 1-2" to ((0, 0), (1, 2))."""
    return tuple((int(i), int(j)) for i, j in (link.split("-") for link in pharaoh.split()))


@functools.cache
def phrase(english: str, french: str, links: str = "0-0", feminine: bool = False) -> Phrase:
    return Phrase(tuple(english.split()), tuple(french.split()), parse_links(links), feminine)


def join(phrases: Sequence[Phrase], order: Sequence[int] | None = None) -> Phrase:
    """Concatenate phrases. `order` lists their indices in French order; by default it is the English order."""
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
    positions: list[int] = []  # index in `words` of each word of `sentence.french`
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
    """A noun, parsed from "cat chat m"."""

    english: tuple[str, str]  # singular, plural
    french: tuple[str, str]
    feminine: bool

    @classmethod
    def parse(cls, entry: str) -> Self:
        english, french, gender = entry.split()
        return cls((english, english_plural(english)), (french, french_plural(french)), gender == "f")


class Adjective(NamedTuple):
    order: str  # size (before the French noun), quality or origin (after it)
    kinds: tuple[str, ...]  # kinds of nouns that it may describe
    english: str
    masculine: str
    feminine: str
    before_vowel: str  # masculine singular before a vowel, as in "vieil homme"

    @classmethod
    def parse(cls, order: str, kinds: str, forms: str) -> Self:
        english, masculine, feminine, *before_vowel = forms.split()
        return cls(order, tuple(kinds.split()), english, masculine, feminine, *(before_vowel or [masculine]))

    def agreeing(self, head: Phrase) -> Phrase:
        """Inflect the adjective to agree with the noun phrase `head`."""
        if not (head.feminine or head.plural) and starts_with_vowel(head.french[0]):
            return phrase(self.english, self.before_vowel)
        return phrase(self.english, agree(self.masculine, self.feminine, head.feminine, head.plural))


class Determiner(NamedTuple):
    weight: int
    plural: bool
    roles: tuple[str, ...]  # letters that demo_words.yaml explains
    english: str
    masculine: str
    feminine: str

    @classmethod
    def parse(cls, weight: str, number: str, roles: str, forms: str) -> Self:
        return cls(int(weight), number == "plural", tuple(roles.split()), *forms.split("/"))

    def agreeing(self, head: Phrase, before_adjective: bool) -> Phrase:
        """Inflect the determiner to agree with the noun phrase `head`."""
        french = self.feminine if head.feminine else self.masculine
        if french == "des" and before_adjective:
            french = "de"  # "de petits chats"
        return phrase(self.english, french, "0-0 0-1" if " " in french else "0-0")


class Verb(NamedTuple):
    english: tuple[str, ...]  # base, third person singular, past
    french: tuple[str, ...]  # present singular, present plural, participle, infinitive, future singular
    takes: tuple[str, ...]  # transitive: kinds of nouns that are objects; intransitive: groups of prepositions
    etre: bool  # whether "être" forms the past, in which the participle agrees with the subject

    @classmethod
    def parse(cls, english: str, french: str, takes: str, auxiliary: str = "avoir") -> Self:
        forms = tuple(english.split()), tuple(french.split())
        return cls(*forms, tuple(takes.split()), auxiliary == "être")


class VerbGroup(NamedTuple):
    """The templates of a verb group in both languages. Their fields in braces are forms of a verb, and an adverb."""

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
    """Return the forms of a verb that fill the English and the French fields of a `VerbGroup`, in the third person."""
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


COPULAS = {  # whether the subject is plural -> English and French forms of "to be"
    False: ({"present": "is", "past": "was"}, {"present": "est", "past": "était", "future": "sera"}),
    True: ({"present": "are", "past": "were"}, {"present": "sont", "past": "étaient", "future": "seront"}),
}


class Lexicon:
    """The words of demo_words.yaml."""

    def __init__(self) -> None:
        tables = {
            name: [[cell.strip() for cell in row.split("|")] for row in table.splitlines()]
            for name, table in yaml.safe_load(WORDS.read_text(encoding="utf-8")).items()
        }
        self.nouns: dict[str, list[Noun]] = {}  # kind -> nouns
        for kind, entries in tables["nouns"]:
            self.nouns.setdefault(kind, []).extend(Noun.parse(entry) for entry in entries.split(","))
        self.adjectives = [Adjective.parse(*row) for row in tables["adjectives"]]
        self.determiners = [Determiner.parse(*row) for row in tables["determiners"]]
        self.transitive = [Verb.parse(*row) for row in tables["transitive"]]
        self.intransitive = [Verb.parse(*row) for row in tables["intransitive"]]
        self.verb_groups = [VerbGroup.parse(*row) for row in tables["verb_groups"]]
        self.copula_groups = [VerbGroup.parse(*row) for row in tables["copula_groups"]]
        # Group -> its prepositions, each with the kind of noun that follows.
        self.prepositions: dict[str, list[tuple[Phrase, str]]] = {}
        for group, *words, kind in tables["prepositions"]:
            self.prepositions.setdefault(group, []).append((phrase(*words), kind))
        self.times: dict[str, list[Phrase]] = {}  # tense -> adverbials of time
        for tense, *words in tables["times"]:
            self.times.setdefault(tense, []).append(phrase(*words))
        self.adverbs = tables["adverbs"]
        self.institutions = [phrase(*words, gender == "f") for *words, gender in tables["institutions"]]
        self.names = [phrase(name, name, feminine=gender == "f") for name, gender in tables["names"]]
        self.pronouns = [phrase(*words, feminine=gender == "f") for *words, gender in tables["pronouns"]]
        self.connectives = [phrase(*words) for words in tables["connectives"]]
        self.reports: dict[bool, list[Phrase]] = {False: [], True: []}  # whether the subject is plural -> verbs
        for number, english, french in tables["reports"]:
            self.reports[number == "plural"].append(phrase(f"{english} that", f"{french} que", "0-0 1-1"))

    def fitting_adjectives(self, kind: str, *orders: str) -> list[Adjective]:
        """Select the adjectives of these orders that may describe a kind of noun."""
        return [adjective for adjective in self.adjectives if kind in adjective.kinds and adjective.order in orders]

    def determiners_for(self, role: str) -> list[Determiner]:
        """Select the determiners for a role, which is a letter that demo_words.yaml explains."""
        return [determiner for determiner in self.determiners if role in determiner.roles]


Weighted = TypeVar("Weighted", Determiner, VerbGroup)


def generate(size: int, seed: int = 1) -> list[tuple[str, str, str]]:
    """Generate sentence pairs without repeating an English sentence: English, French, links as in "0-0 1-2"."""
    grammar = Grammar(random.Random(seed))
    pairs: dict[str, tuple[str, str, str]] = {}
    while len(pairs) < size:
        sentence = grammar.sentence()
        english = " ".join(sentence.english)
        if MIN_WORDS <= len(sentence.english) <= MAX_WORDS and english not in pairs:
            links = " ".join(f"{i}-{j}" for i, j in sentence.links)
            pairs[english] = english, " ".join(sentence.french), links
    return [*pairs.values()]


class Grammar:
    """Draws aligned sentences. Each method is a rule that returns an aligned phrase."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.words = rng, Lexicon()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def sentence(self) -> Phrase:
        count = self.rng.choices(CLAUSES, CLAUSE_WEIGHTS)[0]
        parts = [self.clause()]
        for _ in range(count - 1):
            connective = self.rng.choice(self.words.connectives)
            # No compound subject after "and": "A saw B and C and D slept" would be ambiguous.
            parts += [connective, self.clause(compound=connective.english != ("and",))]
        return spell(join([*parts, phrase(".", ".")]))

    def clause(self, compound: bool = True) -> Phrase:
        """Draw a clause. `compound` allows a compound subject such as "the queen and the cat"."""
        rules = (self.transitive, self.intransitive, self.copular, self.report)
        if self.chance(0.07):
            return self.existential()
        return self.rng.choices(rules, (52, 22, 14, 8))[0](compound)

    def transitive(self, compound: bool) -> Phrase:
        verb = self.rng.choice(self.words.transitive)
        subject = self.subject(compound, relative=self.chance(0.2))
        group, words = self.verb_group(verb, subject)
        relative = not group.negated and self.chance(0.3)
        parts = [subject, words, self.object(verb, group, relative)]
        if self.chance(0.3):
            parts.append(self.prepositional(self.rng.choice(("inside", "company", "event"))))
        return join(parts) if relative else self.timed(parts, group)

    def intransitive(self, compound: bool) -> Phrase:
        verb = self.rng.choice(self.words.intransitive)
        # With "être" the participle agrees with the subject, so no relative clause stands between subject and verb.
        subject = self.subject(compound, relative=not verb.etre and self.chance(0.2))
        group, words = self.verb_group(verb, subject)
        parts = [subject, words]
        if self.chance(0.6):
            parts.append(self.prepositional(self.rng.choice(verb.takes)))
        return self.timed(parts, group)

    def timed(self, parts: list[Phrase], group: VerbGroup) -> Phrase:
        """Join the parts of a clause, sometimes with an adverbial of time: last in English, first in French."""
        if not self.chance(0.2):
            return join(parts)
        time = self.rng.choice(self.words.times[group.tense])
        return join([*parts, time], order=(len(parts), *range(len(parts))))

    def copular(self, compound: bool) -> Phrase:
        kind = self.rng.choice(list(self.words.nouns))
        subject = self.subject(compound, relative=False) if kind == "person" else self.noun_phrase(kind, "o")
        return join([subject, self.predicate(kind, subject)])

    def predicate(self, kind: str, subject: Phrase) -> Phrase:
        """Draw a predicate such as "is very old"."""
        group = self.weighted(self.words.copula_groups)
        english, french = COPULAS[subject.plural]
        adjective = self.rng.choice(self.words.fitting_adjectives(kind, "quality", "origin"))
        parts = [self.fill(group, english, french), adjective.agreeing(subject)]
        if self.chance(0.3):
            parts.insert(1, phrase("very", "très"))
        return join(parts)

    def existential(self) -> Phrase:
        kind = self.rng.choice(list(self.words.nouns))
        thing = self.noun_phrase(kind, "e", relative=self.chance(0.3))
        there = phrase("there are" if thing.plural else "there is", "il y a", "0-0 0-1 1-2")
        return join([there, thing, self.prepositional("inside")])

    def report(self, compound: bool) -> Phrase:
        subject = self.subject(compound, relative=False)
        return join([subject, self.rng.choice(self.words.reports[subject.plural]), self.clause()])

    def subject(self, compound: bool, relative: bool) -> Phrase:
        if relative:
            return self.noun_phrase(self.rng.choice(ANIMATE), "o", relative=True)
        rules = (self.animate, self.name, self.pronoun, self.institution, self.compound)
        return self.rng.choices(rules, (55, 15, 12, 8, 10 * compound))[0]()

    def object(self, verb: Verb, group: VerbGroup, relative: bool = False) -> Phrase:
        return self.noun_phrase(self.rng.choice(verb.takes), "n" if group.negated else "o", relative)

    def animate(self) -> Phrase:
        return self.noun_phrase(self.rng.choice(ANIMATE), "o")

    def name(self) -> Phrase:
        return self.rng.choice(self.words.names)

    def pronoun(self) -> Phrase:
        return self.rng.choice(self.words.pronouns)

    def institution(self) -> Phrase:
        name = self.rng.choice(self.words.institutions)
        article = phrase("the", "la" if name.feminine else "le")
        return join([article, name])._replace(feminine=name.feminine)

    def compound(self) -> Phrase:
        first, second = self.animate(), self.rng.choice((self.animate, self.name))()
        both = join([first, phrase("and", "et"), second])
        return both._replace(feminine=first.feminine and second.feminine, plural=True)

    def prepositional(self, group: str) -> Phrase:
        preposition, kind = self.rng.choice(self.words.prepositions[group])
        return join([preposition, self.noun_phrase(kind, "p")])

    def noun_phrase(self, kind: str, role: str, relative: bool = False) -> Phrase:
        """Draw determiner, adjectives and noun, sometimes with a relative clause or an owner.

        `role` is a letter that demo_words.yaml explains. The English order is size, quality, origin, noun; the French
        order is size, noun, origin, quality.
        """
        if kind == "institution":
            return self.institution()
        noun = self.rng.choice(self.words.nouns[kind])
        determiner = self.weighted(self.words.determiners_for(role))
        head = Phrase((noun.english[determiner.plural],), (noun.french[determiner.plural],), ((0, 0),))
        head = head._replace(feminine=noun.feminine, plural=determiner.plural)
        before = self.adjectives(kind, "size", 0.3)
        after = self.adjectives(kind, "quality", 0.25) + self.adjectives(kind, "origin", 0.2)
        adjectives = [adjective.agreeing(head) for adjective in before + after]
        last = len(adjectives) + 1
        order = [0, *range(1, 1 + len(before)), last, *range(last - 1, len(before), -1)]
        words = join([determiner.agreeing(head, bool(before)), *adjectives, head], order)
        if determiner.english == "a" and words.english[1][0].lower() in "aeiou":
            words = words._replace(english=("an", *words.english[1:]))
        if relative:
            words = join([words, self.relative(kind, head)])
        elif determiner.english == "the" and kind in OWNED and self.chance(0.2):
            words = join([words, phrase("of", "de"), self.owner()])
        return words._replace(feminine=head.feminine, plural=head.plural)

    def action(self, subject: Phrase) -> Phrase:
        """Draw the verb phrase of a relative clause about the noun `subject`, such as "sees the cat"."""
        if self.chance(0.7):
            verb = self.rng.choice(self.words.transitive)
            group, words = self.verb_group(verb, subject)
            return join([words, self.object(verb, group)])
        verb = self.rng.choice(self.words.intransitive)
        _, words = self.verb_group(verb, subject)
        return join([words, self.prepositional(self.rng.choice(verb.takes))])

    def adjectives(self, kind: str, order: str, probability: float) -> list[Adjective]:
        """Draw, with the given probability, an adjective of an order such as "size" -> a list of one or none."""
        if not self.chance(probability):
            return []
        fitting = self.words.fitting_adjectives(kind, order)
        return [self.rng.choice(fitting)] if fitting else []

    def owner(self) -> Phrase:
        return self.rng.choice((self.name, self.institution, lambda: self.noun_phrase("person", "d")))()

    def relative(self, kind: str, head: Phrase) -> Phrase:
        """Draw a relative clause, such as "who sees the cat" or "where the king sleeps"."""
        if kind == "place" and self.chance(0.4):
            subject = self.subject(compound=False, relative=False)
            _, words = self.verb_group(self.rng.choice(self.words.intransitive), subject)
            return join([phrase("where", "où"), subject, words])
        who = phrase("who" if kind == "person" else "which", "qui")
        if kind in ANIMATE and self.chance(0.65):
            return join([who, self.action(head)])
        verbs = [verb for verb in self.words.transitive if kind in verb.takes]
        if not verbs or self.chance(0.25):
            return join([who, self.predicate(kind, head)])
        subject = self.subject(compound=False, relative=False)
        # The past is left out: its participle would have to agree with the noun before "que".
        _, words = self.verb_group(self.rng.choice(verbs), subject, tenses=("present", "future"))
        return join([phrase("whom" if kind == "person" else "that", "que"), subject, words])

    def verb_group(self, verb: Verb, subject: Phrase, tenses: Sequence[str] = TENSES) -> tuple[VerbGroup, Phrase]:
        group = self.weighted([group for group in self.words.verb_groups if group.tense in tenses])
        return group, self.fill(group, *inflect(verb, subject.feminine, subject.plural))

    def fill(self, group: VerbGroup, english: dict[str, str], french: dict[str, str]) -> Phrase:
        adverb, adverbe = self.rng.choice(self.words.adverbs)
        words = group.english.format(adverb=adverb, **english), group.french.format(adverb=adverbe, **french)
        return Phrase(tuple(words[0].split()), tuple(words[1].split()), group.links)

    def weighted(self, options: Sequence[Weighted]) -> Weighted:
        return self.rng.choices(options, [option.weight for option in options])[0]


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    rows = [("en", "fr", "alignment"), *generate(PAIRS)]
    text = "".join("\t".join(row) + "\n" for row in rows)
    output.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))  # equal text gives equal bytes


if __name__ == "__main__":
    main()
