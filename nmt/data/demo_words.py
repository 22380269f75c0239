"""Words of the demo corpus: aligned phrases and parts of speech with their inflection and spelling, and word tables.

The English determines the French: no verb has equal present and past ("read"), and no noun has equal singular and
plural ("fish"). The spelling of a word determines "a" or "an", which excludes "hour".
"""

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


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


ANIMATE = ("person", "animal")
OWNED = ("animal", "document", "object", "place")

NOUNS: dict[str, list[Noun]] = {}
for _kind, _entries in _rows("""
person   | doctor médecin m, nurse infirmière f, teacher professeur m, baker boulanger m, queen reine f
person   | king roi m, girl fille f, man homme m, woman femme f, child enfant m, witch sorcière f
person   | pirate pirate m, engineer ingénieur m, actress actrice f
animal   | cat chat m, dog chien m, horse cheval m, bird oiseau m, mouse souris f, donkey âne m, cow vache f
document | letter lettre f, book livre m, report rapport m, poem poème m, story histoire f
document | newspaper journal m
food     | cake gâteau m, apple pomme f, cheese fromage m, egg œuf m, onion oignon m
object   | key clé f, bicycle vélo m, clock horloge f, umbrella parapluie m, hat chapeau m, piano piano m
place    | house maison f, garden jardin m, school école f, hospital hôpital m, village village m
place    | market marché m, kitchen cuisine f, castle château m
event    | meeting réunion f, party fête f, war guerre f
"""):
    NOUNS.setdefault(_kind, []).extend(Noun.parse(entry) for entry in _entries.split(","))

ADJECTIVES = [
    Adjective.parse(*row)
    for row in _rows("""
size    | person animal document food object place event | small petit petite
size    | person animal document object place            | old vieux vieille vieil
size    | document object place                          | new nouveau nouvelle nouvel
size    | animal object place                            | beautiful beau belle bel
size    | animal object place                            | large grand grande
size    | person animal                                  | young jeune jeune
size    | person                                         | former ancien ancienne
size    | person document food                           | good bon bonne
quality | person document place                          | famous célèbre célèbre
quality | person animal                                  | brave courageux courageuse
quality | person animal                                  | lazy paresseux paresseuse
quality | person animal document object place event      | strange étrange étrange
quality | document place event                           | secret secret secrète
quality | document event                                 | important important importante
origin  | animal food object                             | red rouge rouge
origin  | animal object                                  | green vert verte
origin  | animal object                                  | black noir noire
origin  | animal object place                            | white blanc blanche
origin  | person document food place                     | French français française
origin  | person document food place                     | Italian italien italienne
""")
]

# Roles: o subject or object, n object under negation, p after a preposition, d owner, e after "there is".
DETERMINERS = [
    Determiner.parse(*row)
    for row in _rows("""
10 | singular | o n p d | the/le/la
5  | plural   | o n p d | the/les/les
4  | singular | o p e   | a/un/une
4  | singular | n       | a/de/de
2  | singular | o n p d | this/ce/cette
1  | plural   | o n p d | these/ces/ces
1  | singular | o n p d | my/mon/ma
1  | plural   | o n p d | my/mes/mes
1  | singular | o n p d | his/son/sa
1  | plural   | o n p d | his/ses/ses
1  | singular | o n p d | her/son/sa
1  | plural   | o n p d | her/ses/ses
1  | singular | o       | every/chaque/chaque
2  | plural   | o e     | some/des/des
3  | plural   | n       | any/de/de
1  | plural   | o n p e | two/deux/deux
1  | plural   | o n p e | three/trois/trois
1  | plural   | o e     | several/plusieurs/plusieurs
1  | plural   | o e     | many/beaucoup de/beaucoup de
""")
]

TRANSITIVE = [
    Verb.parse(*row)
    for row in _rows("""
see sees saw                    | voit voient vu voir verra                         | person animal object
know knows knew                 | connaît connaissent connu connaître connaîtra     | person animal place
love loves loved                | aime aiment aimé aimer aimera                     | person animal food place
follow follows followed         | suit suivent suivi suivre suivra                  | person animal
thank thanks thanked            | remercie remercient remercié remercier remerciera | person
write writes wrote              | écrit écrivent écrit écrire écrira                | document
sign signs signed               | signe signent signé signer signera                | document
translate translates translated | traduit traduisent traduit traduire traduira      | document
eat eats ate                    | mange mangent mangé manger mangera                | food
buy buys bought                 | achète achètent acheté acheter achètera           | document food object
sell sells sold                 | vend vendent vendu vendre vendra                  | document food object
find finds found                | trouve trouvent trouvé trouver trouvera           | animal document object
visit visits visited            | visite visitent visité visiter visitera           | place
criticise criticises criticised | critique critiquent critiqué critiquer critiquera | person institution
""")
]

# With the groups of prepositions that each takes.
INTRANSITIVE = [
    Verb.parse(*row)
    for row in _rows("""
sleep sleeps slept      | dort dorment dormi dormir dormira                      | inside event         | avoir
work works worked       | travaille travaillent travaillé travailler travaillera | inside company event | avoir
sing sings sang         | chante chantent chanté chanter chantera                | inside company event | avoir
arrive arrives arrived  | arrive arrivent arrivé arriver arrivera                | at company event     | être
leave leaves left       | part partent parti partir partira                      | company event        | être
return returns returned | revient reviennent revenu revenir reviendra            | to company event     | être
""")
]

VERB_GROUPS = [
    VerbGroup.parse(*row)
    for row in _rows("""
8 | present | {present}             | {present}                       | 0-0
3 | present | {adverb} {present}    | {present} {adverb}              | 0-1 1-0
3 | present | {do} not {base}       | ne {present} pas                | 0-1 1-0 1-2 2-1
1 | present | never {present}       | ne {present} jamais             | 0-0 0-2 1-1
1 | present | no longer {present}   | ne {present} plus               | 0-0 1-2 2-1
2 | present | can {base}            | {can} {infinitive}              | 0-0 1-1
1 | present | cannot {base}         | ne {can} pas {infinitive}       | 0-0 0-1 0-2 1-3
1 | present | must {base}           | {must} {infinitive}             | 0-0 1-1
1 | present | must not {base}       | ne {must} pas {infinitive}      | 0-1 1-0 1-2 2-3
1 | present | {want} to {base}      | {want} {infinitive}             | 0-0 1-1 2-1
1 | present | {do} not want to {base} | ne {want} pas {infinitive}    | 0-1 1-0 1-2 2-1 3-3 4-3
6 | past    | {past}                | {auxiliary} {participle}        | 0-0 0-1
2 | past    | {adverb} {past}       | {auxiliary} {adverb} {participle} | 0-1 1-0 1-2
2 | past    | did not {base}        | ne {auxiliary} pas {participle} | 0-1 1-0 1-2 2-3
1 | past    | never {past}          | ne {auxiliary} jamais {participle} | 0-0 0-2 1-1 1-3
4 | future  | will {base}           | {future}                        | 0-0 1-0
1 | future  | will not {base}       | ne {future} pas                 | 0-1 1-0 1-2 2-1
1 | future  | will {adverb} {base}  | {future} {adverb}               | 0-0 1-1 2-0
1 | future  | will never {base}     | ne {future} jamais              | 0-1 1-0 1-2 2-1
""")
]

COPULAS = {  # by number of the subject
    False: ({"present": "is", "past": "was"}, {"present": "est", "past": "était", "future": "sera"}),
    True: ({"present": "are", "past": "were"}, {"present": "sont", "past": "étaient", "future": "seront"}),
}
COPULA_GROUPS = [
    VerbGroup.parse(*row)
    for row in _rows("""
6 | present | {present}          | {present}          | 0-0
2 | present | {present} not      | ne {present} pas   | 0-1 1-0 1-2
1 | present | {present} {adverb} | {present} {adverb} | 0-0 1-1
3 | past    | {past}             | {past}             | 0-0
1 | past    | {past} not         | ne {past} pas      | 0-1 1-0 1-2
2 | future  | will be            | {future}           | 0-0 1-0
1 | future  | will not be        | ne {future} pas    | 0-1 1-0 1-2 2-1
""")
]

ADVERBS = [("often", "souvent"), ("always", "toujours"), ("sometimes", "parfois"), ("rarely", "rarement")]

# By group: prepositions, each with the kind of noun that follows.
PREPOSITIONS: dict[str, list[tuple[Phrase, str]]] = {}
for _group, _english, _french, _links, _kind in _rows("""
inside  | in          | dans       | 0-0         | place
inside  | near        | près de    | 0-0 0-1     | place
inside  | behind      | derrière   | 0-0         | place
inside  | in front of | devant     | 0-0 1-0 2-0 | place
inside  | under       | sous       | 0-0         | object
inside  | next to     | à côté de  | 0-0 0-1 1-2 | place
company | with        | avec       | 0-0         | person
company | for         | pour       | 0-0         | institution
company | without     | sans       | 0-0         | person
event   | before      | avant      | 0-0         | event
event   | after       | après      | 0-0         | event
event   | during      | pendant    | 0-0         | event
at      | at          | à          | 0-0         | place
to      | to          | à          | 0-0         | place
"""):
    PREPOSITIONS.setdefault(_group, []).append((phrase(_english, _french, _links), _kind))

# By tense. They end an English clause and start a French one.
TIMES: dict[str, list[Phrase]] = {}
for _tense, *_time in _rows("""
present | now          | maintenant         | 0-0
present | every day    | tous les jours     | 0-0 0-1 1-2
past    | yesterday    | hier               | 0-0
past    | last week    | la semaine dernière | 0-2 1-0 1-1
past    | this morning | ce matin           | 0-0 1-1
future  | tomorrow     | demain             | 0-0
future  | next year    | la année prochaine | 0-2 1-0 1-1
future  | this evening | ce soir            | 0-0 1-1
"""):
    TIMES.setdefault(_tense, []).append(phrase(*_time))

INSTITUTIONS = [
    phrase(english, french, links, gender == "f")
    for english, french, links, gender in _rows("""
European Economic Area      | zone économique européenne           | 0-2 1-1 2-0             | f
European Central Bank       | Banque centrale européenne           | 0-2 1-1 2-0             | f
European Union              | Union européenne                     | 0-1 1-0                 | f
International Monetary Fund | Fonds monétaire international        | 0-2 1-1 2-0             | m
International Space Station | Station spatiale internationale      | 0-2 1-1 2-0             | f
Royal Geographical Society  | Société royale de géographie         | 0-1 1-2 1-3 2-0         | f
World Health Organization   | Organisation mondiale de la santé    | 0-1 1-2 1-3 1-4 2-0     | f
Red Cross                   | Croix-Rouge                          | 0-0 1-0                 | f
""")
]

NAMES = [
    *[phrase(name, name, feminine=True) for name in ("Marie", "Anna", "Claire")],
    *[phrase(name, name) for name in ("Paul", "Thomas", "Louis")],
]
PRONOUNS = [phrase("he", "il"), phrase("she", "elle", feminine=True)]

REPORTS = {  # by number of the subject
    plural: [phrase(f"{english} that", f"{french} que", "0-0 1-1") for english, french in verbs]
    for plural, verbs in (
        (False, [("thinks", "pense"), ("says", "dit"), ("knows", "sait")]),
        (True, [("think", "pensent"), ("say", "disent"), ("know", "savent")]),
    )
}
CONNECTIVES = [
    phrase("and", "et"),
    phrase(", but", ", mais", "0-0 1-1"),
    phrase("because", "parce que", "0-0 0-1"),
    phrase("while", "tandis que", "0-0 0-1"),
]


@functools.cache
def adjectives(kind: str, *orders: str) -> list[Adjective]:
    """Adjectives of these orders that may describe a kind of noun."""
    return [adjective for adjective in ADJECTIVES if kind in adjective.kinds and adjective.order in orders]


@functools.cache
def determiners(role: str) -> list[Determiner]:
    """The determiners that may stand in this role."""
    return [determiner for determiner in DETERMINERS if role in determiner.roles]
