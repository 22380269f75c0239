"""Fonts for labels in any script: the base font, then installed fonts for the characters that it lacks.

matplotlib shapes text, orders it from right to left where needed, and takes each character from the first font of a
list that has it. It does not search the installed fonts for that list; this module does.
"""

import logging
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from warnings import catch_warnings, filterwarnings

from matplotlib.font_manager import FontEntry, findfont, findSystemFonts, fontManager
from matplotlib.ft2font import FaceFlags, FT2Font

log = logging.getLogger(__name__)

BASE = "DejaVu Sans"  # comes with matplotlib; covers Latin, Greek, Cyrillic, Arabic, Hebrew and a few more scripts
REGULAR = range(300, 501)  # font weights
LAST_RESORT = re.compile("Mono|Unifont")  # families used only if no other has the characters
# Unicode categories that need no font: invisible, or (private use) without a meaning of their own.
INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs"}
NONCHARACTER = 0x8FFFF  # unassigned; only a font that draws a box for every code point has a glyph for it

SYMBOLS = "symbols and emoji"
# Script by the first word of a character's Unicode name, where the two differ.
SCRIPTS = {"Cjk": "Han", "Ideographic": "Han", "Katakana-Hiragana": "Katakana", "Halfwidth": "Katakana"}
# Han characters differ in shape by region; kana or Hangul in the same text identify it.
REGIONS = {"Hiragana": "JP", "Katakana": "JP", "Hangul": "KR"}
# Debian packages; other systems use similar names.
PACKAGES = {SYMBOLS: "fonts-symbola"} | dict.fromkeys(("Han", "Bopomofo", *REGIONS), "fonts-noto-cjk")
DEFAULT_PACKAGE = "fonts-noto-core"

_warned: set[str] = set()  # scripts


def families(text: str) -> list[str]:
    """The font families to draw a text with, the base font first.

    Searches the installed fonts only for characters that the base font lacks. Characters that no font has are drawn
    as boxes; a warning says so once per process and script.
    """
    base = _characters(str(findfont(BASE)), 0)
    by_script: dict[str, set[str]] = {}
    for character in sorted(set(text)):
        if character not in base and unicodedata.category(character) not in INVISIBLE:
            by_script.setdefault(script_of(character), set()).add(character)
    region = next((region for script, region in REGIONS.items() if script in by_script), "SC")
    result = [BASE]
    for script, characters in by_script.items():
        names, missing = _choose(characters, region)
        if missing:
            _add_new_fonts()
            names, missing = _choose(characters, region)
        if missing:
            _warn(script, min(missing, key=lambda character: (not character.isalpha(), character)))
        result += names
    return list(dict.fromkeys(result))


def script_of(character: str) -> str:
    """The script by the character's Unicode name: "Han", "Thai", ..., or "symbols and emoji"."""
    name = unicodedata.name(character, "")
    kind, width = unicodedata.category(character)[0], unicodedata.east_asian_width(character)
    if not name:
        return "characters unknown to Python"
    if width == "F" or (width == "W" and kind == "P"):  # Chinese, Japanese and Korean punctuation
        return "Han"
    if kind == "S":
        return SYMBOLS
    first = name.split()[0].title()
    return SCRIPTS.get(first, first)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress matplotlib's warnings about missing glyphs and inexact font weights."""
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
    """Families for characters of one script, and the characters that no font has.

    Prefers the first family that covers at least half of the remaining characters over a later one that covers more,
    so that one rare character does not decide the font of all others.
    """

    def gain(face: FontEntry) -> int:
        return min(2 * len(_covered(face, characters)), len(characters))

    names, faces = [], _faces(region)
    while characters:
        best = max(faces, key=gain)
        covered = _covered(best, characters)
        if not covered:
            break
        names.append(best.name)
        characters = characters - covered
    return names, characters


def _faces(region: str) -> list[FontEntry]:
    """The face of each family that matplotlib would draw with, in order of preference."""

    def distance_from_regular(face: FontEntry) -> tuple[bool, bool, float, bool]:
        return face.style != "normal", face.variant != "normal", abs(int(face.weight) - 400), face.stretch != "normal"

    def preference(face: FontEntry) -> tuple[bool, bool, bool, bool, str]:
        return (
            face.style != "normal" or face.weight not in REGULAR,
            LAST_RESORT.search(face.name) is not None,
            "Sans" not in face.name,
            not face.name.endswith(region),
            face.name,
        )

    by_family: dict[str, FontEntry] = {}
    for face in sorted(fontManager.ttflist, key=distance_from_regular):
        by_family.setdefault(face.name, face)
    return sorted(by_family.values(), key=preference)


def _covered(face: FontEntry, characters: set[str]) -> set[str]:
    available = _characters(face.fname, face.index)
    return {character for character in characters if character in available}


@cache
def _characters(file: str, index: int) -> str:
    """The characters that a font draws; none for fonts of boxes and for colour fonts, which matplotlib cannot draw."""
    try:
        font = FT2Font(file, face_index=index)
    except (OSError, RuntimeError):  # removed or damaged since matplotlib listed it
        return ""
    if FaceFlags.COLOR in font.face_flags or font.get_char_index(NONCHARACTER):
        return ""
    return "".join(map(chr, font.get_charmap()))  # a set of a large font takes 20 times the memory


@cache
def _add_new_fonts() -> None:
    """Add fonts installed since matplotlib cached its list, once per process."""
    for file in sorted(set(findSystemFonts()) - {face.fname for face in fontManager.ttflist}):
        with suppress(Exception):  # a file that is no font may raise any error
            fontManager.addfont(file)


def _warn(script: str, example: str) -> None:
    if script not in _warned:
        _warned.add(script)
        message = "no installed font has glyphs for %s (such as %s): heatmaps show boxes; install one, e.g. %s"
        log.warning(message, script, example, PACKAGES.get(script, DEFAULT_PACKAGE))
