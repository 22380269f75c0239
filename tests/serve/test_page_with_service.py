"""The page in a browser, before the real service and small trained models."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys
from served import Process, process, trained
from served_page import Page, served_page

from nmt import Translator

LINE = "a small dog sees the red house ."


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("page")
    local = "attention=luong_local_p"
    return [trained(folder / "bahdanau"), trained(folder / "local", local, "training.max_steps=3", "seed=2")]


@pytest.fixture(scope="module")
def service(runs: list[Path]) -> Iterator[Process]:
    with process(runs[0].parent, f"run=[{runs[0]},{runs[1]}]", "precision=fp32") as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with served_page() as page:
        yield page


@pytest.fixture
def page(browser: Page, service: Process) -> Page:
    browser.chrome.get("about:blank")
    browser.chrome.get_log("browser")
    browser.addresses()
    browser.chrome.get(f"{service.address}/#{urlencode({'text': LINE})}")
    browser.wait(lambda: browser.find("[role=gridcell]"), 30)
    return browser


def weight(page: Page, row: int, column: int) -> float:
    """Of a cell; NaN while the page draws the table anew."""
    return float(page.label(row, column).rpartition(" ")[2] or "nan")


@pytest.fixture(scope="module")
def translator(runs: list[Path]) -> Translator:
    return Translator.load(runs[0], device="cpu", precision="fp32", threads=1)


def test_it_shows_the_translation_and_its_attention(page: Page, translator: Translator) -> None:
    (own,) = translator.translate([LINE])
    assert page.best() == own.text
    assert own.alignment is not None
    for row, column in ((0, 0), (1, 2)):
        expected = own.alignment[row, column]
        page.wait(lambda: np.isclose(weight(page, row, column), expected, atol=0.001))  # noqa: B023
    assert page.text("#about").startswith("additive")


def test_a_steered_step_attends_there(page: Page, translator: Translator) -> None:
    (own,) = translator.translate([LINE])
    last = len(own.source_tokens) - 1
    page.js("arguments[0].focus()", page.cell(1, last))
    page.press(Keys.ENTER)
    page.wait(lambda: page.label(1, last).endswith(": 1.000"), 30)
    (steered,) = translator.translate([LINE], prefix=own.tokens[:1], attend={1: last})
    page.wait(lambda: page.best() == steered.text)
    assert "attends to" in page.text("#steerings")


def test_saliency_and_window_come_from_the_service(page: Page, translator: Translator) -> None:
    from nmt.explain.explanation import explain

    page.choose("#weights", "saliency")
    found = explain(translator, LINE, translator.translate([LINE])[0].tokens)
    assert found.saliency is not None
    expected = found.saliency[0, 0]
    page.wait(lambda: np.isclose(weight(page, 0, 0), expected, atol=0.001), 30)
    page.choose("#model", "local")
    page.wait(lambda: page.one("#overlay-choice").is_displayed(), 30)


def test_a_translation_of_ones_own_is_scored(page: Page, translator: Translator) -> None:
    page.one("#own").send_keys("le chien")
    (scored,) = translator.score([LINE], ["le chien"])
    shown = f"{abs(scored.log_prob):.3f}"
    page.wait(lambda: shown in "".join(page.texts("#own-probabilities")), 30)
    assert len(page.find("#own-probabilities .token")) == len(scored.tokens)


def test_a_translation_of_ones_own_may_have_unknown_characters(page: Page, translator: Translator) -> None:
    from nmt.explain.explanation import explain

    own = "le Ж chien"
    page.choose("#weights", "saliency")
    page.one("#own").send_keys(own)
    page.wait(lambda: page.one("#show-own").is_enabled(), 30)
    if not page.one("#show-own").is_selected():
        page.one("#show-own").click()
    found = explain(translator, LINE, own)
    assert found.saliency is not None
    last = found.saliency.shape[0] - 1
    page.wait(lambda: np.isclose(weight(page, last, 0), found.saliency[last, 0], atol=0.001), 30)


def test_the_tree_and_the_models_side_by_side(page: Page, runs: list[Path]) -> None:
    page.one("#tab-beam").click()
    page.wait(lambda: page.find("#tree-box svg"), 30)
    assert page.text("#tree-story").startswith("Step ")
    page.one("#tab-compare").click()
    other = Translator.load(runs[1], device="cpu", precision="fp32", threads=1).translate([LINE])[0]
    page.wait(lambda: other.text in " ".join(" ".join(page.texts("#compare-cards")).split()), 30)


def test_nothing_else_is_asked_and_nothing_is_complained_of(page: Page, service: Process) -> None:
    assert {address.split("/")[2] for address in page.addresses() if address.startswith("http")} == {
        service.address.split("/")[2]
    }
    assert page.chrome.get_log("browser") == []
