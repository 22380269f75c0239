"""The page between a change and the answer to it: what is shown is of the text before."""

import threading
from collections.abc import Iterator

import pytest
from served_page import SENTENCE, TRANSLATION, Page, served_page
from stub_server import Failure


@pytest.fixture(scope="module")
def served() -> Iterator[Page]:
    with served_page() as page:
        yield page


@pytest.fixture
def page(served: Page) -> Page:
    served.open(text=SENTENCE)
    return served


def ask_for_another_text(page: Page) -> threading.Event:
    """Its answer comes once the event is set."""
    event, before = threading.Event(), len(page.asked())
    page.knobs.latency = lambda _: 0.0 if event.wait(20) else 1.0
    page.type(" and a hat")
    page.wait(lambda: len(page.asked()) > before)
    return event


def test_the_translation_of_the_text_before_cannot_be_steered(page: Page) -> None:
    answer = ask_for_another_text(page)
    page.cell(1, 9).click()
    answer.set()
    page.wait(lambda: page.best() == f"{TRANSLATION} et un chapeau")
    assert [body["attend"] for body in page.asked()] == [None, None]
    assert not page.find(".steerings li")
    page.cell(1, 9).click()
    page.wait(lambda: page.find(".steerings li"))


def test_the_beam_may_be_opened_before_the_answer(page: Page) -> None:
    page.one("#tab-beam").click()
    page.wait(lambda: page.find(".tree .node"))
    page.one("#tab-alignment").click()
    answer = ask_for_another_text(page)
    page.one("#tab-beam").click()
    answer.set()
    page.wait(lambda: page.best() == f"{TRANSLATION} et un chapeau")
    assert page.find(".tree .node")


def test_the_best_translation_of_another_text_is_selected(page: Page) -> None:
    page.find(".translation input")[1].click()
    page.type(" and a hat")
    page.wait(lambda: page.best() == f"{TRANSLATION} et un chapeau")
    assert page.find(".translation input")[0].is_selected()


def test_other_settings_keep_the_selected_translation(page: Page) -> None:
    page.find(".translation input")[1].click()
    page.js("document.getElementById('beam_size').closest('details')?.setAttribute('open', '')")
    page.one("#beam_size").send_keys("6")
    page.wait(lambda: len(page.asked()) == 2 and page.text("#status") != "Translating…")
    assert page.find(".translation input")[1].is_selected()


def test_an_error_about_weights_goes_with_their_choice(page: Page) -> None:
    page.knobs.failures.append(Failure(503, "too busy", retry_after=30))
    page.choose("#weights", "saliency")
    page.wait(lambda: page.text("#alignment-status") == "too busy. Trying again in 30 s.")
    page.choose("#weights", "attention")
    page.wait(lambda: page.text("#alignment-status") == "")
