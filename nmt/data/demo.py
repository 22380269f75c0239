"""The built-in demo corpus: English-French pairs with gold word alignments, from a synchronous grammar.

Each rule generates both sides and their links, so the alignment is exact. The French is a function of the English, so
a perfect model reaches 100 BLEU. Spaces separate words, elided French words ("l'", "n'", "qu'") and punctuation; only
names and English nationalities are capitalised. Every word has a link:

- "not" and "never" to both halves of the negation; "does", "did" and "will" to the French finite verb;
- "saw" to auxiliary and participle ("a vu"), "to" to the infinitive, "because" to both words of "parce que";
- "of" and "the" both to a contracted "du"; "many" to both words of "beaucoup de"; "there" to both words of "il y".
"""

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from nmt.data import demo_words as lexicon
from nmt.data.demo_words import Adjective, Determiner, Phrase, Verb, VerbGroup, inflect, join, phrase, spell

VERSION = 1  # part of the cache fingerprint: increase it when the text generated for a seed changes
MIN_WORDS, MAX_WORDS = 4, 45  # of an English sentence, with the full stop
CLAUSES, CLAUSE_WEIGHTS = (1, 2, 3, 4), (68, 15, 10, 7)
TENSES = ("present", "past", "future")

Weighted = TypeVar("Weighted", Determiner, VerbGroup)


class DemoSplits(NamedTuple):
    """Triples of English, French and their gold alignment in Pharaoh format."""

    train: list[tuple[str, str, str]]
    validation: list[tuple[str, str, str]]
    test: list[tuple[str, str, str]]


def generate(train_size: int, validation_size: int, test_size: int, seed: int) -> DemoSplits:
    """Generate sentence pairs without repeating an English sentence. A larger `train_size` only appends pairs.

    Raises ValueError for a negative size.
    """
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} is {size}; give 0 or more sentences")
    grammar = Grammar(random.Random(seed))
    seen: set[str] = set()

    def draw(size: int) -> list[tuple[str, str, str]]:
        pairs: list[tuple[str, str, str]] = []
        while len(pairs) < size:
            sentence = grammar.sentence()
            english = " ".join(sentence.english)
            if MIN_WORDS <= len(sentence.english) <= MAX_WORDS and english not in seen:
                seen.add(english)
                pharaoh = " ".join(f"{i}-{j}" for i, j in sentence.links)
                pairs.append((english, " ".join(sentence.french), pharaoh))
        return pairs

    test, validation = draw(test_size), draw(validation_size)
    return DemoSplits(draw(train_size), validation, test)


class Grammar:
    """Draws aligned sentences. Each method is a rule that returns an aligned phrase."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def sentence(self) -> Phrase:
        count = self.rng.choices(CLAUSES, CLAUSE_WEIGHTS)[0]
        parts = [self.clause()]
        for _ in range(count - 1):
            connective = self.rng.choice(lexicon.CONNECTIVES)
            # No compound subject after "and": "A saw B and C and D slept" would be ambiguous.
            parts += [connective, self.clause(compound=connective.english != ("and",))]
        return spell(join([*parts, phrase(".", ".")]))

    def clause(self, compound: bool = True) -> Phrase:
        """`compound` allows a compound subject such as "the queen and the cat"."""
        rules = (self.transitive, self.intransitive, self.copular, self.report)
        if self.chance(0.07):
            return self.existential()
        return self.rng.choices(rules, (52, 22, 14, 8))[0](compound)

    def transitive(self, compound: bool) -> Phrase:
        verb = self.rng.choice(lexicon.TRANSITIVE)
        subject = self.subject(compound, relative=self.chance(0.2))
        group, words = self.verb_group(verb, subject)
        relative = not group.negated and self.chance(0.3)
        parts = [subject, words, self.object(verb, group, relative)]
        if self.chance(0.3):
            parts.append(self.prepositional(self.rng.choice(("inside", "company", "event"))))
        return join(parts) if relative else self.timed(parts, group)

    def intransitive(self, compound: bool) -> Phrase:
        verb = self.rng.choice(lexicon.INTRANSITIVE)
        # After "être" the participle agrees with the subject, so no relative clause stands between them.
        subject = self.subject(compound, relative=not verb.etre and self.chance(0.2))
        group, words = self.verb_group(verb, subject)
        parts = [subject, words]
        if self.chance(0.6):
            parts.append(self.prepositional(self.rng.choice(verb.takes)))
        return self.timed(parts, group)

    def timed(self, parts: list[Phrase], group: VerbGroup) -> Phrase:
        """Join the parts, sometimes with a time, which ends the English clause and starts the French one."""
        if not self.chance(0.2):
            return join(parts)
        time = self.rng.choice(lexicon.TIMES[group.tense])
        return join([*parts, time], order=(len(parts), *range(len(parts))))

    def copular(self, compound: bool) -> Phrase:
        kind = self.rng.choice(list(lexicon.NOUNS))
        subject = self.subject(compound, relative=False) if kind == "person" else self.noun_phrase(kind, "o")
        return join([subject, self.predicate(kind, subject)])

    def predicate(self, kind: str, subject: Phrase) -> Phrase:
        """ "is very old"."""
        group = self.weighted(lexicon.COPULA_GROUPS)
        english, french = lexicon.COPULAS[subject.plural]
        adjective = self.rng.choice(lexicon.adjectives(kind, "quality", "origin"))
        parts = [self.fill(group, english, french), adjective.agreeing(subject)]
        if self.chance(0.3):
            parts.insert(1, phrase("very", "très"))
        return join(parts)

    def existential(self) -> Phrase:
        kind = self.rng.choice(list(lexicon.NOUNS))
        thing = self.noun_phrase(kind, "e", relative=self.chance(0.3))
        there = phrase("there are" if thing.plural else "there is", "il y a", "0-0 0-1 1-2")
        return join([there, thing, self.prepositional("inside")])

    def report(self, compound: bool) -> Phrase:
        subject = self.subject(compound, relative=False)
        return join([subject, self.rng.choice(lexicon.REPORTS[subject.plural]), self.clause()])

    def subject(self, compound: bool, relative: bool) -> Phrase:
        if relative:
            return self.noun_phrase(self.rng.choice(lexicon.ANIMATE), "o", relative=True)
        rules = (self.animate, self.name, self.pronoun, self.institution, self.compound)
        return self.rng.choices(rules, (55, 15, 12, 8, 10 * compound))[0]()

    def object(self, verb: Verb, group: VerbGroup, relative: bool = False) -> Phrase:
        return self.noun_phrase(self.rng.choice(verb.takes), "n" if group.negated else "o", relative)

    def animate(self) -> Phrase:
        return self.noun_phrase(self.rng.choice(lexicon.ANIMATE), "o")

    def name(self) -> Phrase:
        return self.rng.choice(lexicon.NAMES)

    def pronoun(self) -> Phrase:
        return self.rng.choice(lexicon.PRONOUNS)

    def institution(self) -> Phrase:
        name = self.rng.choice(lexicon.INSTITUTIONS)
        article = phrase("the", "la" if name.feminine else "le")
        return join([article, name])._replace(feminine=name.feminine)

    def compound(self) -> Phrase:
        first, second = self.animate(), self.rng.choice((self.animate, self.name))()
        both = join([first, phrase("and", "et"), second])
        return both._replace(feminine=first.feminine and second.feminine, plural=True)

    def prepositional(self, group: str) -> Phrase:
        preposition, kind = self.rng.choice(lexicon.PREPOSITIONS[group])
        return join([preposition, self.noun_phrase(kind, "p")])

    def noun_phrase(self, kind: str, role: str, relative: bool = False) -> Phrase:
        """Determiner, adjectives and noun, sometimes with a relative clause or an owner.

        English orders adjectives by size, quality, origin. French puts size before the noun and the others after it,
        in reverse order.
        """
        if kind == "institution":
            return self.institution()
        noun = self.rng.choice(lexicon.NOUNS[kind])
        determiner = self.weighted(lexicon.determiners(role))
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
        elif determiner.english == "the" and kind in lexicon.OWNED and self.chance(0.2):
            words = join([words, phrase("of", "de"), self.owner()])
        return words._replace(feminine=head.feminine, plural=head.plural)

    def action(self, subject: Phrase) -> Phrase:
        """The verb phrase of a relative clause with this subject."""
        if self.chance(0.7):
            verb = self.rng.choice(lexicon.TRANSITIVE)
            group, words = self.verb_group(verb, subject)
            return join([words, self.object(verb, group)])
        verb = self.rng.choice(lexicon.INTRANSITIVE)
        _, words = self.verb_group(verb, subject)
        return join([words, self.prepositional(self.rng.choice(verb.takes))])

    def adjectives(self, kind: str, order: str, probability: float) -> list[Adjective]:
        """At most one adjective of an order."""
        if not self.chance(probability):
            return []
        fitting = lexicon.adjectives(kind, order)
        return [self.rng.choice(fitting)] if fitting else []

    def owner(self) -> Phrase:
        return self.rng.choice((self.name, self.institution, lambda: self.noun_phrase("person", "d")))()

    def relative(self, kind: str, head: Phrase) -> Phrase:
        """ "who sees the cat", "which is red", "whom / that the king sees", "where the king sleeps"."""
        if kind == "place" and self.chance(0.4):
            subject = self.subject(compound=False, relative=False)
            _, words = self.verb_group(self.rng.choice(lexicon.INTRANSITIVE), subject)
            return join([phrase("where", "où"), subject, words])
        who = phrase("who" if kind == "person" else "which", "qui")
        if kind in lexicon.ANIMATE and self.chance(0.65):
            return join([who, self.action(head)])
        verbs = [verb for verb in lexicon.TRANSITIVE if kind in verb.takes]
        if not verbs or self.chance(0.25):
            return join([who, self.predicate(kind, head)])
        subject = self.subject(compound=False, relative=False)
        # Not in the past, whose participle would agree with the noun before "que".
        _, words = self.verb_group(self.rng.choice(verbs), subject, tenses=("present", "future"))
        return join([phrase("whom" if kind == "person" else "that", "que"), subject, words])

    def verb_group(self, verb: Verb, subject: Phrase, tenses: Sequence[str] = TENSES) -> tuple[VerbGroup, Phrase]:
        group = self.weighted([group for group in lexicon.VERB_GROUPS if group.tense in tenses])
        return group, self.fill(group, *inflect(verb, subject.feminine, subject.plural))

    def fill(self, group: VerbGroup, english: dict[str, str], french: dict[str, str]) -> Phrase:
        adverb, adverbe = self.rng.choice(lexicon.ADVERBS)
        words = group.english.format(adverb=adverb, **english), group.french.format(adverb=adverbe, **french)
        return Phrase(tuple(words[0].split()), tuple(words[1].split()), group.links)

    def weighted(self, options: Sequence[Weighted]) -> Weighted:
        return self.rng.choices(options, [option.weight for option in options])[0]
