"""The page's pictures: heatmap and lines, forced decoding, steering, the beam's tree, models side by side, files."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys
from served_page import SENTENCE, TRANSLATION, Page, served_page
from stub_server import Failure

MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def served() -> Iterator[Page]:
    with served_page() as page:
        yield page


@pytest.fixture
def page(served: Page) -> Page:
    """With a translation and its heatmap."""
    served.open(text=SENTENCE)
    served.wait(lambda: served.find("[role=gridcell]"))
    return served


def lit(page: Page, selector: str) -> list[str]:
    return page.texts(f"{selector} .lit")


def test_pointing_at_a_cell_lights_its_row_column_and_line(page: Page) -> None:
    page.point_at(page.cell(6, 4))
    assert page.text("#readout") == "▁rouge ← ▁red 0.648"
    assert (lit(page, ".labels.rows"), lit(page, ".labels.columns")) == (["▁rouge"], ["▁red"])
    assert len(page.find(".cells .band")) == 2
    assert len(page.find(".curve.lit")) == 1
    assert [text.removesuffix("0.65") for text in lit(page, ".links .side")] == ["▁red", "▁rouge"]
    page.point_at(page.one("h1"))
    assert not page.find(".cells .band, .curve.lit")
    assert page.text("#readout").startswith("Point at a cell")


def test_pointing_at_a_word_lights_its_lines(page: Page) -> None:
    target = page.find(".links .side")[1].find_elements("css selector", ".word")
    page.point_at(target[4])
    assert page.text("#readout").startswith("▁chape ← ▁hat 0.648")
    assert lit(page, ".labels.rows") == ["▁chape"]
    assert len(page.find(".cells .band")) == 1
    assert len(page.find(".curve.lit")) > 1
    source = page.find(".links .side")[0].find_elements("css selector", ".word")
    page.point_at(source[0])
    assert page.text("#readout").startswith("▁A → ▁un 0.77")
    page.press(Keys.TAB)


def test_the_keyboard_walks_through_grid_and_lines(page: Page) -> None:
    page.js("arguments[0].focus()", page.cell(0, 0))
    assert page.focused() == "▁un from ▁A: 0.774"
    page.press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert page.focused().startswith("▁homme from ▁man: ")
    assert page.text("#readout").startswith("▁homme ← ▁man")
    page.press(Keys.END, Keys.ARROW_UP, Keys.HOME, Keys.ARROW_LEFT)  # stays inside
    assert page.focused().startswith("▁un from ▁A")
    assert len(page.find("[role=gridcell][tabindex='0']")) == 1
    page.press(Keys.TAB)  # one stop of the grid, then the lines
    assert page.focused().startswith("▁A: ▁un 0.77")
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.focused().startswith("▁in: ▁dans 0.65")
    page.press(Keys.ARROW_RIGHT)
    assert page.focused().startswith("▁dans: ▁in 0.65")
    outline = "return getComputedStyle(document.querySelector('.word:focus-visible .hit')).strokeWidth"
    assert page.js(outline) == "2px"


def test_sub_words_or_words(page: Page) -> None:
    assert "▁chape" in page.texts(".labels.rows text")
    page.tick("unit", "words")
    assert page.texts(".labels.rows text")[4] == "chapeau"
    assert page.texts("#probabilities .token")[4] == "chapeau"
    assert page.cell(4, 5).get_attribute("aria-label") == "chapeau from hat: 0.648"


def test_other_weights_are_asked_for_on_demand(page: Page) -> None:
    assert page.asked("/v1/explain") == []
    page.choose("#weights", "saliency")
    page.wait(lambda: page.label(0, 0) == "▁un from ▁A: 0.433")
    page.choose("#weights", "difference")
    page.wait(lambda: page.label(0, 0) == "▁un from ▁A: 0.342")
    assert page.cell(0, 8).get_attribute("aria-label").endswith(f": {MINUS}0.044")
    (body,) = page.asked("/v1/explain")  # the second picture needs nothing new
    assert body["saliency"] is True
    assert body["target"][:2] == ["▁un", "▁homme"]
    below, above = (
        page.js(f"return getComputedStyle(document.querySelector('{each}')).stroke")
        for each in (".below", ".curve:not(.below)")
    )
    assert below != above


def test_heads_windows_and_stops_where_the_model_has_them(page: Page) -> None:
    assert not page.one("#overlay-choice").is_displayed()
    page.choose("#model", "multihead")
    page.wait(lambda: len(page.find("#weights option")) == 7)
    page.choose("#weights", "head-2")
    page.wait(lambda: page.asked("/v1/explain"))
    page.choose("#model", "local")
    page.wait(lambda: page.one("#overlay-choice").is_displayed())
    page.one("#overlay").click()
    page.wait(lambda: len(page.find(".cells .window")) == 13)
    assert len(page.find(".cells .centre")) == 13
    page.choose("#model", "monotonic")
    page.wait(lambda: len(page.find(".cells circle.stop")) == len(page.find(".labels.rows text")) - 1)
    assert page.text("#overlay-name") == "where it stopped"


def test_without_attention_it_says_so_and_offers_saliency(page: Page) -> None:
    page.choose("#model", "none")
    page.wait(lambda: "This model has no attention" in page.text("#notice"))
    assert not page.find("[role=gridcell]")
    page.one("#notice button").click()
    page.wait(lambda: page.find("[role=gridcell]"))
    assert not page.one("#notice").is_displayed()
    page.cell(1, 1).click()  # nothing to steer
    time.sleep(0.3)
    assert not any(body["attend"] for body in page.asked())


def test_forced_decoding(page: Page) -> None:
    page.one("#own").send_keys("un cabot")
    page.wait(lambda: page.texts("#own-probabilities .token") == ["▁un", "▁cabot", "</s>"])
    assert page.asked()[-1]["target"] == "un cabot"
    assert page.texts("#own-probabilities .probability") == ["72 %", "0.30 %", "0.30 %"]
    assert page.texts("#own-probabilities dd") == [f"{MINUS}11.947", "53.64", "3"]
    assert page.one("#show-own").is_selected()
    assert page.texts(".labels.rows text") == ["▁un", "▁cabot", "</s>"]
    page.find(".translation input")[1].click()  # the second translation found
    page.wait(lambda: len(page.texts(".labels.rows text")) == 13)
    page.one("#copy").click()
    page.wait(lambda: page.one("#own").get_attribute("value") == page.texts(".translation .text")[1])
    page.wait(lambda: len(page.texts("#own-probabilities .token")) == 13)


def test_one_of_the_best_is_chosen(page: Page) -> None:
    scores = [float(text.replace(MINUS, "-")) for text in page.texts(".translation .score")]
    assert scores == sorted(scores, reverse=True)
    page.find(".translation input")[1].click()
    assert "▁verme" in page.texts(".labels.rows text")
    page.press(Keys.ARROW_UP)
    assert "▁rouge" in page.texts(".labels.rows text")


def test_steering_a_search(page: Page) -> None:
    page.cell(1, 9).click()
    page.wait(lambda: page.best() == TRANSLATION.replace("homme", "chien"))
    steered = page.asked()[-1]
    assert (steered["prefix"], steered["attend"]) == (["▁un"], {"1": 9})
    assert page.texts(".translation:first-child mark") == ["chien"]
    assert len(page.find(".cells .steered")) == 1
    assert page.texts(".steerings li span") == ["step 2: ▁chien attends to ▁dog"]
    assert page.text(".without") == f"Without steering: {TRANSLATION}"
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ENTER)  # step 4, the source's "small"
    page.wait(lambda: page.best().startswith("un chien dans petit chapeau"))
    steered = page.asked()[-1]
    assert (steered["prefix"], steered["attend"]) == (["▁un", "▁chien", "▁dans"], {"1": 9, "3": 8})
    page.cell(2, 0).click()  # an earlier step than the last one, which changes what comes after
    page.wait(lambda: page.best().startswith("un chien un "))
    assert page.asked()[-1]["attend"] == {"1": 9, "2": 0}
    page.cell(2, 0).click()  # once more takes it back
    page.wait(lambda: page.best() == TRANSLATION.replace("homme", "chien"))
    assert page.asked()[-1]["attend"] == {"1": 9}
    assert len(page.find(".steerings li")) == 1
    page.one(".steerings li button").click()
    page.wait(lambda: page.best() == TRANSLATION)
    assert (page.asked()[-1]["prefix"], page.asked()[-1]["attend"]) == (None, None)
    assert not page.find(".steerings li, .cells .steered, .translation mark")


def test_what_steers_the_list_can_be_undone_while_a_given_translation_is_shown(page: Page) -> None:
    page.cell(1, 9).click()
    page.wait(lambda: page.best() == TRANSLATION.replace("homme", "chien"))
    page.one("#own").send_keys("un chien")
    page.wait(lambda: page.texts(".labels.rows text") == ["▁un", "▁chien", "</s>"])
    assert page.texts("#list-steerings li span") == ["step 2: ▁chien attends to ▁dog"]
    page.cell(0, 4).click()
    page.wait(lambda: page.texts("#steerings li span") == ["step 1: ▁un attends to ▁red"])
    page.one("#list-steerings li button").click()
    page.wait(lambda: page.best() == TRANSLATION)
    assert not page.one("#list-steerings").is_displayed()


def test_side_by_side_says_that_it_is_not_steered(page: Page) -> None:
    page.one("#tab-compare").click()
    assert not page.one("#compare-steered").is_displayed()
    page.one("#tab-alignment").click()
    page.cell(1, 9).click()
    page.wait(lambda: page.find(".steerings li"))
    page.one("#tab-compare").click()
    assert page.one("#compare-steered").is_displayed()


@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("words", [4, 84])
def test_both_pictures_have_room(served: Page, width: int, words: int) -> None:
    served.open(width=width, text=" ".join(["dog", "man", "hat", "red"] * (words // 4)))
    served.wait(lambda: served.find("[role=gridcell]"))
    room = served.js("return document.getElementById('pictures').clientWidth")
    heatmap, links = (served.one(f"#{name}").size["width"] for name in ("heatmap", "links"))
    assert links >= min(260, room)
    beside = served.one("#heatmap").location["y"] == served.one("#links").location["y"]
    assert heatmap + links > 0.9 * room if beside else links == room


def test_more_translations_than_the_beam_holds_widen_it(served: Page) -> None:
    served.open(text=SENTENCE, nbest=6)
    body = served.asked()[-1]
    assert body["nbest"] == body["beam_size"] == 6
    served.open(text=SENTENCE, nbest=2)
    assert served.asked()[-1]["beam_size"] is None


def test_examples_are_whole_and_figures_apart(page: Page) -> None:
    box = "const [box] = arguments; return box.scrollHeight <= box.clientHeight"
    page.one("#examples-box summary").click()
    assert page.js(box, page.one("#examples"))
    page.one("#tab-beam").click()
    page.wait(lambda: page.find(".tree .node"))
    gaps = page.js(
        "return [...document.querySelectorAll('.tree .node')].map(node => {"
        "const [score, share] = [...node.querySelectorAll('.score')].map(each => each.getBoundingClientRect());"
        "return share.left - score.right})"
    )
    assert min(gaps) >= 6


def test_steerings_end_with_the_text(page: Page) -> None:
    page.cell(1, 9).click()
    page.wait(lambda: page.find(".steerings li"))
    page.one("#source").send_keys(" and a hat")
    page.wait(lambda: page.best().endswith("et un chapeau"))
    assert page.asked()[-1]["attend"] is None
    assert not page.find(".steerings li")


def test_what_the_service_refuses_is_not_steered(page: Page) -> None:
    page.cell(1, 9).click()
    page.wait(lambda: page.best() == TRANSLATION.replace("homme", "chien"))
    page.knobs.failures.append(Failure(400, "an ensemble cannot be steered"))
    page.cell(3, 0).click()
    page.wait(lambda: page.text("#error") == "an ensemble cannot be steered")
    page.wait(lambda: page.texts(".steerings li span") == ["step 2: ▁chien attends to ▁dog"])
    assert page.best() == TRANSLATION.replace("homme", "chien")


def test_steering_what_is_given(page: Page) -> None:
    page.one("#own").send_keys("un chien")
    page.wait(lambda: page.texts(".labels.rows text") == ["▁un", "▁chien", "</s>"])
    page.cell(1, 9).click()
    page.wait(lambda: page.texts("#own-probabilities .probability")[1] == "72 %")
    body = page.asked()[-1]
    assert (body["target"], body["attend"]) == ("un chien", {"1": 9})
    assert "prefix" not in body
    page.find(".steerings button")[-1].click()
    page.wait(lambda: page.texts("#own-probabilities .probability")[1] == "0.30 %")


def path(page: Page) -> str:
    """The text along the path that the tree sets off."""
    return "".join(page.texts(".tree .node.chosen .token")).replace("▁", " ").removesuffix("</s>").strip()


def test_the_tree_of_the_beam(page: Page) -> None:
    assert page.asked()[-1]["tree"] is False
    page.one("#tab-beam").click()
    page.wait(lambda: page.find(".tree .node"))
    assert page.asked()[-1]["tree"] is True
    assert path(page) == TRANSLATION
    assert len(page.find(".tree .edge.chosen")) == 12
    kept, ended, pruned = (len(page.find(f".node.{fate}")) for fate in ("kept", "ended", "pruned"))
    assert ended == 4
    assert min(kept, pruned) > 20
    page.js("arguments[0].focus()", page.find(".node")[0])
    assert page.focused() == f"▁un, step 1, kept, probability 72 %, log-probability {MINUS}0.33, score {MINUS}0.33"
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert page.focused().startswith("▁type, step 2, kept, probability 20 %")
    assert page.texts("#tree-detail > *") == [
        "▁un ▁type",
        "token 20 %",
        f"log-prob {MINUS}1.938",
        f"score {MINUS}0.969",
        "kept: extended at the next step",
    ]
    assert len(page.find(".edge.lit")) == 2
    page.press(Keys.ARROW_LEFT)
    assert page.focused().startswith("▁un, step 1")
    page.one("#tree-pruned").click()
    assert len(page.find(".node.pruned")) == 0


def test_the_beam_grows_step_by_step(page: Page) -> None:
    page.one("#tab-beam").click()
    page.wait(lambda: page.find(".tree .node"))
    page.one("#tree-slider").send_keys(Keys.HOME)
    assert len(page.find(".node")) == 2
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.text("#tree-story") == "Step 3 of 13: 4 hypotheses in the beam gave 8 candidates: 4 kept, 4 pruned."
    page.one("#tree-play").click()
    page.wait(lambda: int(page.text("#tree-story").split()[1]) >= 5)  # a slow test may see a later step
    page.one("#tree-play").click()
    page.one("#tree-slider").send_keys(Keys.END)
    for number in (2, 3):  # of equal length
        page.find(".translation input")[number].click()
        assert path(page) == page.texts(".translation .text")[number]


def test_models_side_by_side(page: Page) -> None:
    page.open(text="A man in a red hat", view="compare", models=["bahdanau-1", "multihead", "none"])
    page.wait(lambda: len(page.find(".card .text")) == 3)
    assert page.texts(".card .text") == ["un homme dans un chapeau rouge", *["un homme dans un rouge chapeau"] * 2]
    marked = page.js(
        "return [...document.querySelectorAll('.card')]"
        ".map(card => [...card.querySelectorAll('mark')].map(word => word.textContent))"
    )
    assert marked in ([["chapeau"], ["chapeau"], ["chapeau"]], [["rouge"], ["rouge"], ["rouge"]])
    assert len(page.find(".card .thumbnail svg")) == 2
    assert "No attention" in page.texts(".card")[2]
    for name in ("local", "monotonic", "ensemble"):
        page.one(f"#compare-chooser [value='{name}']").click()
    page.wait(lambda: len(page.find(".card .text")) == 6)
    assert not page.one("#compare-chooser [value='posterior']").is_enabled()
    page.one("#compare-chooser [value='none']").click()
    page.wait(lambda: len(page.find(".card .text")) == 5)
    assert page.one("#compare-chooser [value='posterior']").is_enabled()
    asked = [body["model"] for body in page.asked() if body["nbest"] == 1]
    assert sorted(asked) == sorted(set(asked))  # each once
    page.find(".card button")[1].click()
    page.wait(lambda: page.best() == "un homme dans un rouge chapeau")
    assert page.one("#alignment").is_displayed()


def test_downloads(page: Page, tmp_path: Path) -> None:
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.chrome.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    for kind in ("svg", "png", "json"):
        page.one(f"#save-{kind}").click()
        page.wait(lambda kind=kind: (tmp_path / f"bahdanau-1-alignment.{kind}").exists())
    drawn = (tmp_path / "bahdanau-1-alignment.svg").read_text(encoding="utf-8")
    assert drawn.count(">homme</text>") == 2  # heatmap and lines
    assert 'stroke="rgb(' in drawn
    assert "class=" not in drawn
    assert (tmp_path / "bahdanau-1-alignment.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((tmp_path / "bahdanau-1-alignment.json").read_text(encoding="utf-8"))
    assert data["translation"] == TRANSLATION
    assert np.array(data["shown"]["weights"]).shape == (len(data["tokens"]), len(data["source_tokens"]))
