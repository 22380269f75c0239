"""The text of the demo corpus is correct: agreement, elision, contraction, articles, capitals, encoding."""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterator

import pytest

from nmt.data.demo import Lexicon, Noun, generate

LEXICON = Lexicon()
NOUNS = [noun for nouns in LEXICON.nouns.values() for noun in nouns]
FRENCH_NOUNS = {form: noun for noun in NOUNS for form in noun.french}
# Written out rather than inflected by the code under test: masculine, feminine, plural of each.
ADJECTIVES = [  # (gender, number) -> form
    dict(zip([("m", "s"), ("f", "s"), ("m", "p"), ("f", "p")], row.split(), strict=True))
    for row in """\
petit petite petits petites
vieux vieille vieux vieilles
nouveau nouvelle nouveaux nouvelles
beau belle beaux belles
grand grande grands grandes
jeune jeune jeunes jeunes
bon bonne bons bonnes
ancien ancienne anciens anciennes
célèbre célèbre célèbres célèbres
étrange étrange étranges étranges
courageux courageuse courageux courageuses
paresseux paresseuse paresseux paresseuses
secret secrète secrets secrètes
important importante importants importantes
rouge rouge rouges rouges
vert verte verts vertes
noir noire noirs noires
blanc blanche blancs blanches
français française français françaises
italien italienne italiens italiennes""".splitlines()
]
BEFORE_VOWEL = {"vieil": "vieux", "nouvel": "nouveau", "bel": "beau"}
ADJECTIVE_FORMS = {form for forms in ADJECTIVES for form in forms.values()} | set(BEFORE_VOWEL)
DETERMINERS = {  # the genders and numbers that each one admits
    **dict.fromkeys(["le", "un", "ce", "cet", "du", "au"], ("m", "s")),
    **dict.fromkeys(["la", "une", "cette", "ma", "sa"], ("f", "s")),
    **dict.fromkeys(["l'", "mon", "son", "chaque"], ("mf", "s")),
    **dict.fromkeys(["les", "des", "ces", "mes", "ses", "deux", "trois", "plusieurs", "aux"], ("mf", "p")),
}


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    return [(english, french) for english, french, _ in generate(2000, 0, 0, seed=11).train]


@pytest.fixture(scope="module")
def texts(pairs: list[tuple[str, str]]) -> list[list[str]]:
    return [french.split() for _, french in pairs]


def has_vowel(word: str) -> bool:
    return word[0].lower() in "aeiouàâéèêîïôûœh"


def noun_phrases(french: list[str]) -> Iterator[tuple[str, list[str], Noun, str, list[str]]]:
    """Determiner, adjectives before, noun, its form, adjectives behind."""
    for at, form in enumerate(french):
        if form in FRENCH_NOUNS:
            left, right = at, at + 1
            while french[left - 1] in ADJECTIVE_FORMS:
                left -= 1
            while french[right] in ADJECTIVE_FORMS:
                right += 1
            yield french[left - 1], french[left:at], FRENCH_NOUNS[form], form, french[at + 1 : right]


def agrees(adjective: str, gender: str, numbers: str) -> bool:
    written = BEFORE_VOWEL.get(adjective, adjective)
    return any(forms[gender, number] == written for forms in ADJECTIVES for number in numbers)


def numbers_of(noun: Noun, form: str) -> str:
    return "".join(number for number, spelling in zip("sp", noun.french, strict=True) if spelling == form)


def test_determiners_and_adjectives_agree_with_their_noun(texts: list[list[str]]) -> None:
    found = 0
    for french in texts:
        for determiner, before, noun, form, after in noun_phrases(french):
            gender, numbers = "f" if noun.feminine else "m", numbers_of(noun, form)
            genders, number = DETERMINERS.get(determiner, ("mf", numbers))  # "de" and "d'" tell nothing
            assert gender in genders, (determiner, form)
            assert set(number) & set(numbers), (determiner, form)
            for adjective in before + after:
                assert agrees(adjective, gender, number if number in numbers else numbers), (adjective, form)
                found += 1
    assert found > 1000


def test_the_feminine_list_is_right() -> None:
    feminine = """infirmière reine fille femme sorcière actrice souris vache lettre histoire pomme clé horloge
    maison école cuisine réunion fête guerre"""
    assert {noun.french[0] for noun in NOUNS if noun.feminine} == set(feminine.split())


def test_plurals_are_right() -> None:
    plurals = {noun.english[1]: noun.french[1] for noun in NOUNS}
    expected = {
        "horses": "chevaux",
        "birds": "oiseaux",
        "newspapers": "journaux",
        "castles": "châteaux",
        "mice": "souris",
        "stories": "histoires",
        "witches": "sorcières",
        "keys": "clés",
        "men": "hommes",
        "women": "femmes",
        "children": "enfants",
    }
    assert expected.items() <= plurals.items()


def test_predicates_and_participles_agree_with_a_pronoun(texts: list[list[str]]) -> None:
    participles = {verb.french[2] for verb in LEXICON.intransitive if verb.etre}
    found = Counter[tuple[str, bool]]()
    for french in texts:
        for at, word in enumerate(french[:-3]):
            gender = {"il": "m", "elle": "f"}.get(word)
            copula = next((j for j in range(at + 1, at + 3) if french[j] in ("est", "était", "sera")), None)
            if gender is None or copula is None:
                continue
            skipped = {"pas", "jamais", "très", *(adverb for _, adverb in LEXICON.adverbs)}
            complement = next(w for w in french[copula + 1 :] if w not in skipped)
            found[gender, complement in ADJECTIVE_FORMS] += 1
            if complement in ADJECTIVE_FORMS:
                assert agrees(complement, gender, "s")
            else:
                assert complement in {form + "e" * (gender == "f") for form in participles}
    assert len(found) == 4


def test_french_elides_and_contracts(texts: list[list[str]]) -> None:
    elided = {"l'", "d'", "n'", "qu'"}
    written = set()
    for french in texts:
        for word, following in itertools.pairwise(french):
            if word in {"le", "la", "je", "ne", "de", "que", "ce", "ma", "sa", "beau", "nouveau"}:
                assert not has_vowel(following), (word, following)
            if word in elided | {"cet", "vieil", "nouvel", "bel"}:
                assert has_vowel(following), (word, following)
            assert (word, following) not in {("de", "le"), ("de", "les"), ("à", "le"), ("à", "les")}
            written.add(word)
    assert elided | {"du", "des", "au", "aux", "cet", "mon", "vieil", "bel"} <= written


def test_vieux_becomes_vieil_before_a_vowel_in_the_singular_only(texts: list[list[str]]) -> None:
    for french in texts:
        for _, before, noun, form, _ in noun_phrases(french):
            if has_vowel(form) and not noun.feminine:
                assert ("vieux" in before) <= (form == noun.french[1])
                assert ("vieil" in before) <= (form == noun.french[0])


def test_english_articles_follow_the_sound(pairs: list[tuple[str, str]]) -> None:
    for english, _ in pairs:
        for word, following in itertools.pairwise(english.split()):
            assert word not in ("a", "an") or (following[0].lower() in "aeiou") == (word == "an")


def test_an_owned_noun_is_definite(pairs: list[tuple[str, str]]) -> None:
    """Neither "his hat of Anna" nor "many hats of Anna"."""
    nouns = {form for noun in NOUNS for form in noun.english}
    adjectives = {adjective.english for adjective in LEXICON.adjectives}
    found = 0
    for english in (english.split() for english, _ in pairs):
        for at in (at for at, word in enumerate(english) if word == "of" and english[at - 1] in nouns):
            assert next(word for word in reversed(english[: at - 1]) if word not in adjectives) == "the"
            found += 1
    assert found > 50


def test_only_names_and_nationalities_have_capitals(pairs: list[tuple[str, str]]) -> None:
    names = LEXICON.names + LEXICON.institutions
    english_names = {word for name in names for word in name.english} | {"French", "Italian"}
    french_names = {word for name in names for word in name.french}
    for side, names_of_side in enumerate((english_names, french_names)):
        written = {word for pair in pairs for word in pair[side].split() if word != word.lower()}
        assert written == {word for word in names_of_side if word != word.lower()}
        assert {name.english[0] for name in LEXICON.names} <= written


def test_text_is_plain_composed_unicode(pairs: list[tuple[str, str]]) -> None:
    for pair in pairs:
        for text in pair:
            assert text == " ".join(text.split())
            assert text.endswith(" .")
            assert unicodedata.is_normalized("NFC", text)
