import itertools
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable

import pytest

from nmt.data.demo import MAX_WORDS, MIN_WORDS, DemoSplits, Grammar, Lexicon, Phrase, generate

Sentence = tuple[list[str], list[str], list[tuple[int, int]]]  # English words, French words, links

LEXICON = Lexicon()
NOUNS = [noun for nouns in LEXICON.nouns.values() for noun in nouns]
VERBS = LEXICON.transitive + LEXICON.intransitive
VERB_FORMS = {form for verb in VERBS for form in verb.english}
VERB_FORMS |= {"is", "are", "was", "were", "be", "thinks", "think", "says", "say"}


@pytest.fixture(scope="module")
def splits() -> DemoSplits:
    return generate(1600, 200, 200, seed=7)


@pytest.fixture(scope="module")
def sentences(splits: DemoSplits) -> list[Sentence]:
    return [parse(*triple) for split in splits for triple in split]


def parse(english: str, french: str, alignment: str) -> Sentence:
    links = [(int(i), int(j)) for i, j in (link.split("-") for link in alignment.split(" "))]
    return english.split(" "), french.split(" "), links


def translations(sentence: Sentence, position: int) -> list[str]:
    _, french, links = sentence
    return [french[j] for i, j in links if i == position]


def test_a_seed_decides_the_corpus() -> None:
    corpus, again, other = (generate(80, 10, 10, seed) for seed in (7, 7, 8))
    assert again == corpus
    assert all(mine != others for mine, others in zip(corpus, other, strict=True))


def test_global_randomness_and_hash_seed_do_not_matter() -> None:
    code = "from nmt.data.demo import generate; print(generate(50, 5, 5, 3))"
    outputs = []
    for hash_seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        outputs.append(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))
    before = random.getstate()
    assert outputs[0] == outputs[1] == f"{generate(50, 5, 5, 3)}\n"
    assert random.getstate() == before


def test_sizes_are_met_and_no_sentence_repeats(splits: DemoSplits) -> None:
    assert [len(split) for split in splits] == [1600, 200, 200]
    english = [triple[0] for split in splits for triple in split]
    assert len(set(english)) == len(english)


def test_a_larger_training_set_keeps_the_other_splits(splits: DemoSplits) -> None:
    smaller = generate(100, 200, 200, seed=7)
    assert smaller.train == splits.train[:100]
    assert (smaller.validation, smaller.test) == (splits.validation, splits.test)


def test_the_french_is_a_function_of_the_english() -> None:
    grammar = Grammar(random.Random(5))
    words = grammar.words  # few, so that phrases repeat
    words.nouns = {kind: nouns[:2] for kind, nouns in words.nouns.items()}
    words.names, words.institutions, words.adverbs = words.names[:1], words.institutions[:1], words.adverbs[:1]
    words.transitive, words.intransitive = words.transitive[:1], words.intransitive[:1]
    rules: list[Callable[[], Phrase]] = [
        grammar.sentence,
        lambda: grammar.transitive(compound=False),
        lambda: grammar.intransitive(compound=True),
        lambda: grammar.copular(compound=True),
        lambda: grammar.noun_phrase("person", "o"),
    ]
    for rule in rules:
        known: dict[tuple[str, ...], Phrase] = {}
        drawn = [rule() for _ in range(1500)]
        for phrase in drawn:
            assert known.setdefault(phrase.english, phrase) == phrase
        assert len(known) < len(drawn)


def test_a_verb_stands_between_two_ands(sentences: list[Sentence]) -> None:
    """Else "A saw B and C and D slept" leaves open who slept, and so the number of the French verb."""
    found = 0
    for english, _, _ in sentences:
        ands = [i for i, word in enumerate(english) if word == "and"]
        for first, second in itertools.pairwise(ands):
            assert VERB_FORMS & set(english[first:second])
            found += 1
    assert found > 20


def test_two_subjects_take_a_plural_verb(sentences: list[Sentence]) -> None:
    singular = {verb.english[1] for verb in VERBS} | {"is", "was", "does", "thinks", "says"}
    found = 0
    for english, _, _ in sentences:
        if "and" in english and not VERB_FORMS & set(english[: english.index("and")]):
            assert next(word for word in english if word in VERB_FORMS | {"does"}) not in singular
            found += 1
    assert found > 20


def test_every_word_is_linked_and_every_link_has_two_words(sentences: list[Sentence]) -> None:
    for english, french, links in sentences:
        assert {i for i, _ in links} == set(range(len(english)))
        assert {j for _, j in links} == set(range(len(french)))
        assert links == sorted(set(links))


def test_nouns_link_to_their_translation_in_the_same_number(sentences: list[Sentence]) -> None:
    expected = {en: fr for noun in NOUNS for en, fr in zip(noun.english, noun.french, strict=True)}
    for sentence in sentences:
        for position, word in enumerate(sentence[0]):
            if word in expected:
                assert translations(sentence, position) == [expected[word]]


def test_verbs_link_to_their_translation_in_the_same_number(sentences: list[Sentence]) -> None:
    expected = {verb.english[1]: {verb.french[0]} for verb in VERBS} | {"knows": {"connaît", "sait"}}
    found = set()
    for sentence in sentences:
        for position, word in enumerate(sentence[0]):
            if word in expected:
                assert set(translations(sentence, position)) <= expected[word]
                found.add(word)
    assert found == set(expected)


def test_adjectives_cross_their_noun_and_size_stays_before_it(sentences: list[Sentence]) -> None:
    orders = {adjective.english: adjective.order for adjective in LEXICON.adjectives}
    orders |= {form: "noun" for noun in NOUNS for form in noun.english}
    found = set()
    for english, _, links in sentences:
        to = dict(links)
        for i, pair in enumerate(itertools.pairwise(english)):
            if pair[0] in orders and pair[1] in orders:
                kinds = orders[pair[0]], orders[pair[1]]
                assert (to[i] < to[i + 1]) == (kinds[0] == "size")
                found.add(kinds)
    assert found == set(itertools.combinations(["size", "quality", "origin", "noun"], 2))


def test_fixed_names_are_reversed(sentences: list[Sentence]) -> None:
    for sentence in sentences:
        english, french, _ = sentence
        if "Economic" in english:
            i = english.index("Economic")
            assert [translations(sentence, i + k)[0] for k in (-1, 0, 1)] == [
                "européenne",
                "économique",
                "zone",
            ]
            assert "zone économique européenne" in " ".join(french)
            return
    pytest.fail("the name does not occur")


def test_negation_links_to_both_halves(sentences: list[Sentence]) -> None:
    half = {"not": "pas", "never": "jamais", "cannot": "pas"}
    found = set()
    for sentence in sentences:
        for position, word in enumerate(sentence[0]):
            if word in half:
                first, *_ = words = translations(sentence, position)
                assert first in ("ne", "n'")
                assert words[-1] == half[word]
                assert len(words) == (3 if word == "cannot" else 2)
                found.add(word)
    assert found == set(half)


def test_indefinite_articles_become_de(
    sentences: list[Sentence],
) -> None:
    bases = {verb.english[0] for verb in LEXICON.transitive}
    size = {adjective.english for adjective in LEXICON.adjectives if adjective.order == "size"}
    found = set()
    for sentence in sentences:
        for at, word in enumerate(sentence[0]):
            is_object = at > 1 and sentence[0][at - 1] in bases and sentence[0][at - 2] in {"not", "cannot"}
            if word in {"a", "an"} and is_object:
                assert translations(sentence, at)[0] in {"de", "d'"}
                found.add("negated a")
            elif word == "any":
                assert translations(sentence, at)[0] in {"de", "d'"}
                found.add("any")
            elif word == "some":
                before_size = sentence[0][at + 1] in size
                assert translations(sentence, at)[0] in ({"de", "d'"} if before_size else {"des"})
                found.add(f"some {before_size}")
    assert found == {"negated a", "any", "some True", "some False"}


def test_a_time_ends_the_english_clause_and_heads_the_french(sentences: list[Sentence]) -> None:
    found = 0
    for english, french, links in sentences:
        if english[-2] == "yesterday" and not {"and", "but", "because", "while", "that"} & set(english):
            assert french[0] == "hier"
            assert (len(english) - 2, 0) in links
            found += 1
    assert found > 3


def test_one_word_may_stand_for_many_and_many_for_one(sentences: list[Sentence]) -> None:
    several = {"because": ["parce", "que"], "there": ["il", "y"], "many": ["beaucoup", "de"], "and": ["et"]}
    found = set()
    for sentence in sentences:
        english, french, links = sentence
        for position, word in enumerate(english):
            if word in several:
                written = translations(sentence, position)
                assert [{"qu'": "que", "d'": "de"}.get(w, w) for w in written] == several[word]
                found.add(word)
        if "devant" in french:  # in front of
            assert sum(j == french.index("devant") for _, j in links) == 3
            found.add("devant")
    assert found == {*several, "devant"}


def test_lengths_spread(sentences: list[Sentence]) -> None:
    lengths = [len(english) for english, _, _ in sentences]
    assert min(lengths) == MIN_WORDS == 4
    assert 40 <= max(lengths) <= MAX_WORDS == 45
    assert 13 <= statistics.mean(lengths) <= 17
    assert sum(length > 25 for length in lengths) >= 0.15 * len(lengths)
    assert sum(length <= 10 for length in lengths) >= 0.3 * len(lengths)


def test_vocabulary_fits_a_small_model(sentences: list[Sentence]) -> None:
    assert 250 <= len({word for english, _, _ in sentences for word in english}) <= 450
    assert 250 <= len({word for _, french, _ in sentences for word in french}) <= 450
