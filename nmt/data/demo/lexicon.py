"""Word tables of the demo corpus.

The English determines the French: no verb has equal present and past ("read"), and no noun has equal singular and
plural ("fish"). The spelling of a word determines "a" or "an", which excludes "hour".
"""

import functools

from nmt.data.demo.phrases import Adjective, Determiner, Noun, Phrase, Verb, VerbGroup, phrase


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
