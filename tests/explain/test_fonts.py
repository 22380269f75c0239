import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontEntry, findfont, fontManager
from matplotlib.ft2font import FaceFlags, FT2Font

from nmt.explain import fonts
from nmt.explain.fonts import BASE, families, quiet, script_of

BASE_FILE = str(findfont(BASE))
LAST_RESORT = Path(matplotlib.get_data_path(), "fonts/ttf/LastResortHE-Regular.ttf")
HAN, KANA, HANGUL, THAI = "狗跑步", "のはカ", "개는", "สุนัข"


def face(name: str, file: str = "", index: int = 0, weight: int = 400, style: str = "normal") -> FontEntry:
    return FontEntry(fname=file or name, index=index, name=name, weight=weight, style=style)


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_warned", set())


class Machine:
    """Whose fonts are invented, all but the base font."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        base_characters = fonts._characters(BASE_FILE, 0)
        self._characters: dict[tuple[str, int], str] = {}
        self._listed: list[FontEntry] = []
        self.new: list[str] = []  # files installed after matplotlib listed what there is
        monkeypatch.setattr(fonts, "_characters", lambda file, index: self._characters[file, index])
        monkeypatch.setattr(fonts, "findSystemFonts", lambda: [*(face.fname for face in self._listed), *self.new])
        monkeypatch.setattr(fontManager, "ttflist", self._listed)
        monkeypatch.setattr(fontManager, "addfont", lambda file: self.install(face(file), HAN))
        fonts._add_new_fonts.cache_clear()
        self.install(face(BASE, BASE_FILE), base_characters)

    def install(self, face: FontEntry, characters: Iterable[str]) -> None:
        self._characters[face.fname, face.index] = "".join(characters)
        self._listed.append(face)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    "text", ["", "Straße été •…", "Моя собака", "σκύλος μου", "كلب", "הכלב", "a\u200d\u3000\ue000"]
)
def test_other_fonts_are_not_looked_at_needlessly(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_faces", lambda region: pytest.fail("looked"))
    assert families(text) == [BASE]


def test_each_script_gets_a_font(machine: Machine) -> None:
    machine.install(face("Han Sans"), HAN)
    machine.install(face("Thai Sans"), THAI)
    assert families("a" + HAN) == [BASE, "Han Sans"]
    assert families(HAN + THAI) == [BASE, "Thai Sans", "Han Sans"]
    assert families(THAI) == [BASE, "Thai Sans"]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (face("Z Sans"), face("A Serif")),
        (face("Z"), face("A Sans Mono")),
        (face("Z"), face("A Unifont")),
        (face("Z", weight=500), face("A Sans", weight=700)),
        (face("Z"), face("A Sans", style="italic")),
        (face("A Sans"), face("B Sans")),
    ],
)
def test_plain_faces_are_preferred(better: FontEntry, worse: FontEntry, machine: Machine) -> None:
    machine.install(worse, THAI)
    machine.install(better, THAI)
    assert families(THAI) == [BASE, better.name]


def test_a_family_has_what_its_regular_face_has(machine: Machine) -> None:
    machine.install(face("A Sans", "bold", weight=700), THAI)
    machine.install(face("A Sans", "regular"), "")
    machine.install(face("Z Sans", weight=700), THAI)
    assert families(THAI) == [BASE, "Z Sans"]


def test_a_file_may_have_several_faces(machine: Machine) -> None:
    machine.install(face("A Sans", "both.ttc", 0), HAN)
    machine.install(face("B Sans", "both.ttc", 1), THAI)
    assert families(HAN) == [BASE, "A Sans"]
    assert families(THAI) == [BASE, "B Sans"]


@pytest.mark.parametrize(("text", "region"), [(HAN, "SC"), (KANA + HAN, "JP"), (HANGUL + HAN, "KR")])
def test_han_characters_look_as_the_text_around_them(text: str, region: str, machine: Machine) -> None:
    for each in ("HK", "JP", "KR", "SC", "TC"):
        machine.install(face(f"Sans CJK {each}"), HAN + KANA + HANGUL)
    assert families(text) == [BASE, f"Sans CJK {region}"]


def test_a_rare_character_does_not_choose_the_font_of_the_others(machine: Machine) -> None:
    machine.install(face("Good Sans"), HAN)
    machine.install(face("Huge"), HAN + "𠀀")
    machine.install(face("A Few Sans"), HAN[0])
    assert families(HAN + "𠀀") == [BASE, "Good Sans", "Huge"]


def test_a_script_without_font_is_named_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.install(face("Han Sans"), HAN)
    assert families(HAN) == [BASE, "Han Sans"]
    assert not caplog.records
    for text in ("。猫" + THAI, "猫犬"):
        assert BASE in families(text)
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            "nmt.explain.fonts",
            logging.WARNING,
            f"no installed font has glyphs for {script} (such as {example}): heatmaps show boxes; "
            f"install one, e.g. {package}",
        )
        for script, example, package in [("Thai", "ข", "fonts-noto-core"), ("Han", "猫", "fonts-noto-cjk")]
    ]


def test_a_font_installed_since_is_found(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.new = ["New Sans"]
    assert families(HAN) == [BASE, "New Sans"]
    assert not caplog.records
    machine.new = ["Newer Sans"]  # the disk is searched once
    assert families(THAI) == [BASE]


def test_no_font_is_opened_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_font(file: str, face_index: int) -> FT2Font:
        opened.append((file, face_index))
        return FT2Font(file, face_index=face_index)

    monkeypatch.setattr(fonts, "FT2Font", open_font)
    fonts._characters.cache_clear()
    for character in "狗猫สक":
        families(character)
    assert len(opened) == len(set(opened)) > 1
    fonts._characters.cache_clear()


def test_characters_of_a_font(tmp_path: Path) -> None:
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    assert "é" in fonts._characters(BASE_FILE, 0)
    assert "狗" not in fonts._characters(BASE_FILE, 0)
    assert fonts._characters(str(tmp_path / "broken.ttf"), 0) == fonts._characters(str(tmp_path / "gone.ttf"), 0) == ""


def test_boxes_and_colours_are_no_glyphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FT2Font(LAST_RESORT).get_char_index(ord("狗"))
    assert fonts._characters(str(LAST_RESORT), 0) == ""
    coloured = SimpleNamespace(
        face_flags=FaceFlags.SCALABLE | FaceFlags.COLOR, get_charmap=lambda: {128512: 1}, get_char_index=lambda _: 0
    )
    monkeypatch.setattr(fonts, "FT2Font", lambda file, face_index: coloured)
    assert fonts._characters("coloured", 0) == ""
    coloured.face_flags = FaceFlags.SCALABLE
    assert fonts._characters("plain", 0) == "😀"


@pytest.mark.parametrize(
    ("characters", "script"),
    [
        ("狗々。「〜\uff0c\uff5e", "Han"),
        ("の", "Hiragana"),
        ("カーｶ", "Katakana"),
        ("개", "Hangul"),
        ("ก", "Thai"),
        ("क।", "Devanagari"),
        ("😀∀", "symbols and emoji"),
        ("\U000eeeee", "characters unknown to Python"),
    ],
)
def test_script(characters: str, script: str) -> None:
    assert {script_of(each) for each in characters} == {script}


def test_matplotlib_is_quiet_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    font_log = logging.getLogger("matplotlib.font_manager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet():
            font_log.warning("Failed to find font weight")
            draw_text("\U000eeeee", [BASE])
        with pytest.raises(UserWarning, match="missing from font"):
            draw_text("\U000eeeee", [BASE])
    assert not caplog.records
    font_log.warning("heard")
    assert caplog.messages == ["heard"]


def draw_text(text: str, family: list[str]) -> None:
    figure = Figure()
    figure.text(0, 0, text, family=family)
    canvas: Any = FigureCanvasAgg(figure)  # its methods are untyped
    canvas.draw()


@pytest.mark.parametrize(
    "text", [HAN, KANA, HANGUL, THAI, "कुत्ता", "কুকুর", "நாய்", "አማርኛ", "မြန်မာ", "🤖", "یہ ہے", "•◌ी", "\U0001d4b3"]
)
def test_glyphs_of_installed_fonts_are_drawn(text: str, caplog: pytest.LogCaptureFixture) -> None:
    chosen = families(text)
    if caplog.records:
        pytest.skip(caplog.messages[0])
    assert len(chosen) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_text(text, chosen)
