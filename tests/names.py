"""A toy language pair with names of random letters, to test whether a model copies names unknown from training."""

import random
import string
from collections.abc import Sequence
from pathlib import Path

NOUNS = {"house": "maison", "car": "voiture", "street": "rue", "table": "table", "letter": "lettre", "door": "porte"}
ADJECTIVES = {"red": "rouge", "large": "large", "old": "ancienne", "white": "blanche", "yellow": "jaune"}
VERBS = {"sees": "voit", "sells": "vend", "buys": "achète", "paints": "peint", "describes": "décrit", "finds": "trouve"}
TIMES = {"today": "aujourd'hui", "often": "souvent", "rarely": "rarement", "now": "maintenant"}


def sentences(count: int, seed: int, known: Sequence[str] = ()) -> list[tuple[str, str, list[str]]]:
    """Generate source, target and names of each sentence; all names are different, and none is in `known`."""
    draw, used, pairs = random.Random(seed), set(known), []
    for _ in range(count):
        names: list[str] = []
        while len(names) < 2:
            name = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(5, 9))).capitalize()
            if name not in used:
                used.add(name)
                names.append(name)
        noun, adjective, verb, time = (draw.choice(list(words)) for words in (NOUNS, ADJECTIVES, VERBS, TIMES))
        source = f"{time} {names[0]} {verb} the {adjective} {noun} of {names[1]} ."
        target = f"{names[0]} {VERBS[verb]} {TIMES[time]} la {NOUNS[noun]} {ADJECTIVES[adjective]} de {names[1]} ."
        pairs.append((source, target, names))
    return pairs


def write_corpus(folder: Path, sizes: Sequence[int] = (3000, 100, 300)) -> list[list[str]]:
    """Write the splits train, valid and test as .en and .fr. Returns the names in each test sentence, which occur in no
    other split."""
    known: list[str] = []
    for seed, (split, size) in enumerate(zip(("train", "valid", "test"), sizes, strict=True), 1):
        pairs = sentences(size, seed, known)
        for side, lang in enumerate(("en", "fr")):
            (folder / f"{split}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
        known += [name for *_, names in pairs for name in names]
    return [names for *_, names in pairs]


def share_of_names(names: Sequence[Sequence[str]], translations: Sequence[str]) -> float:
    """Return the share of names that are words of their sentence's translation."""
    found = [name in text.split() for own, text in zip(names, translations, strict=True) for name in own]
    return sum(found) / len(found)
