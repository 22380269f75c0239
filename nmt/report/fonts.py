"""Fonts for labels in any script: the base font, then installed fonts for the characters that it lacks.

matplotlib shapes text, orders it from right to left where needed, and takes each character from the first font
of a list that has it. What it does not do is to find those fonts.
"""

import logging
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from warnings import catch_warnings, filterwarnings

from matplotlib.font_manager import FontEntry, findfont, findSystemFonts, fontManager
from matplotlib.ft2font import FaceFlags, FT2Font

log = logging.getLogger(__name__)

BASE = "DejaVu Sans"  # comes with matplotlib; has Latin, Greek, Cyrillic, Arabic, Hebrew and some more
REGULAR = range(300, 501)  # weights
LAST_CHOICE = re.compile("Mono|Unifont")  # families, taken only where no other has the characters
# Categories of characters that need no font: nothing is drawn of them, or (private use) they mean nothing outside one.
FONTLESS = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs"}
NOTHING = 0x8FFFF  # no character, nor is any near it: only a font that has a box for everything has it

SYMBOLS = "symbols and emoji"
# What Unicode's character names begin with, where that is not the script's name.
SCRIPTS = {"Cjk": "Han", "Ideographic": "Han", "Katakana-Hiragana": "Katakana", "Halfwidth": "Katakana"}
# Han characters look different by region; kana and Hangul tell which one a text is from.
REGIONS = {"Hiragana": "JP", "Katakana": "JP", "Hangul": "KR"}
# Packages of Debian and its relatives; those of other systems have similar names.
PACKAGES = {SYMBOLS: "fonts-symbola"} | dict.fromkeys(("Han", "Bopomofo", *REGIONS), "fonts-noto-cjk")
OTHER_PACKAGE = "fonts-noto-core"

_warned: set[str] = set()  # scripts


def families(text: str) -> list[str]:
    """The font families to draw the text with, the base font first.

    Only characters that the base font lacks make it look at others. A character without any font is drawn as a
    box; a warning says so once per process and script.
    """
    base = _characters(str(findfont(BASE)), 0)
    scripts: dict[str, set[str]] = {}
    for each in sorted(set(text)):
        if each not in base and unicodedata.category(each) not in FONTLESS:
            scripts.setdefault(script_of(each), set()).add(each)
    region = next((region for script, region in REGIONS.items() if script in scripts), "SC")
    chosen = [BASE]
    for script, characters in scripts.items():
        found, missing = _choose(characters, region)
        if missing:
            _add_new_fonts()
            found, missing = _choose(characters, region)
        if missing:
            _warn(script, min(missing, key=lambda each: (not each.isalpha(), each)))
        chosen += found
    return list(dict.fromkeys(chosen))


def script_of(character: str) -> str:
    """By the character's Unicode name: "Han", "Thai", ..., or "symbols and emoji"."""
    name = unicodedata.name(character, "")
    kind, width = unicodedata.category(character)[0], unicodedata.east_asian_width(character)
    if not name:
        return "characters unknown to Python"
    if width == "F" or (width == "W" and kind == "P"):  # the punctuation of Chinese, Japanese and Korean
        return "Han"
    if kind == "S":
        return SYMBOLS
    first = name.split()[0].title()
    return SCRIPTS.get(first, first)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep matplotlib from warning of each missing glyph, and of fonts whose weight is not exactly regular."""
    font_log = logging.getLogger("matplotlib.font_manager")
    level = font_log.level
    font_log.setLevel(logging.ERROR)
    try:
        with catch_warnings():
            filterwarnings("ignore", message="Glyph .* missing from")
            yield
    finally:
        font_log.setLevel(level)


def _choose(characters: set[str], region: str) -> tuple[list[str], set[str]]:
    """Families for these characters of one script, and the characters that no font has.

    The first choice that has half of what is lacking is better than a later one that has all of it: a rare
    character must not decide how the others look.
    """
    found, faces = [], _faces(region)
    while characters:
        best = max(faces, key=partial(_gain, characters=characters))
        covered = _covered(best, characters)
        if not covered:
            break
        found.append(best.name)
        characters = characters - covered
    return found, characters


def _gain(face: FontEntry, characters: set[str]) -> int:
    return min(2 * len(_covered(face, characters)), len(characters))


def _faces(region: str) -> list[FontEntry]:
    """For each family the face that matplotlib would draw with, the family of first choice first."""
    by_family: dict[str, FontEntry] = {}
    for face in sorted(fontManager.ttflist, key=_distance):
        by_family.setdefault(face.name, face)

    def rank(face: FontEntry) -> tuple[bool, bool, bool, bool, str]:
        return (
            face.style != "normal" or face.weight not in REGULAR,
            LAST_CHOICE.search(face.name) is not None,
            "Sans" not in face.name,
            not face.name.endswith(region),
            face.name,
        )

    return sorted(by_family.values(), key=rank)


def _distance(face: FontEntry) -> tuple[bool, bool, float, bool]:
    """From an upright regular face."""
    return face.style != "normal", face.variant != "normal", abs(int(face.weight) - 400), face.stretch != "normal"


def _covered(face: FontEntry, characters: set[str]) -> set[str]:
    available = _characters(face.fname, face.index)
    return {each for each in characters if each in available}


@cache
def _characters(file: str, index: int) -> str:
    """What a font has glyphs for; nothing if these are boxes, or layers of colour, which draw as nothing at all."""
    try:
        font = FT2Font(file, face_index=index)
    except (OSError, RuntimeError):  # removed or damaged since matplotlib listed it
        return ""
    if FaceFlags.COLOR in font.face_flags or font.get_char_index(NOTHING):
        return ""
    return "".join(map(chr, font.get_charmap()))


@cache
def _add_new_fonts() -> None:
    """Once per process: matplotlib keeps its list of fonts for good and misses what was installed since."""
    for file in sorted(set(findSystemFonts()) - {face.fname for face in fontManager.ttflist}):
        with suppress(Exception):  # of any kind, for a file that is no font matplotlib can draw
            fontManager.addfont(file)


def _warn(script: str, example: str) -> None:
    if script not in _warned:
        _warned.add(script)
        log.warning(
            "no installed font has glyphs for %s (such as %s): heatmaps show boxes; install one, e.g. %s",
            script,
            example,
            PACKAGES.get(script, OTHER_PACKAGE),
        )
