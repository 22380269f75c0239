"""The page of nmt-serve: typing, errors, texts of strangers, links, what it looks like and what it asks for."""

import threading
import time
from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys
from served_page import SENTENCE, TRANSLATION, Page, served_page
from stub_server import Failure

HOSTILE = "<script>alert(1)</script> \u202eabc <img/src=x> &lt; {{7*7}}"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with served_page() as page:
        yield page


def test_it_translates_after_a_pause_and_not_each_key(page: Page) -> None:
    page.open()
    typing = """
        const [text, done] = arguments;
        const field = document.getElementById("source");
        const type = (length) => {
          field.value = text.slice(0, length);
          field.dispatchEvent(new InputEvent("input"));
          if (length < text.length) setTimeout(type, 20, length + 1);
          else done();
        };
        type(1);"""
    page.chrome.execute_async_script(typing, SENTENCE)
    page.wait(lambda: page.best() == TRANSLATION)
    assert [body["text"] for body in page.asked()] == [SENTENCE]
    assert "found in" in page.text("#status")


def test_a_late_answer_never_overwrites_a_newer_one(page: Page) -> None:
    page.open()
    shown = threading.Event()
    page.knobs.latency = lambda body: 0.0 if body.get("text") != "A man" or shown.wait(20) else 1.0
    page.type("A man")
    page.wait(lambda: len(page.asked()) == 1)
    page.type(" sees a dog")
    page.wait(lambda: page.best() == "un homme voit un chien")
    shown.set()
    time.sleep(0.2)
    assert page.best() == "un homme voit un chien"
    assert [body["text"] for body in page.asked()] == ["A man", "A man sees a dog"]
    states = page.js("return performance.getEntriesByType('resource').filter(each => each.name.endsWith('translate'))")
    assert states[0]["responseStatus"] == 0  # aborted


def test_no_text_shows_nothing_and_asks_nothing(page: Page) -> None:
    page.open()
    page.one("#source").send_keys("   ")
    time.sleep(0.4)
    assert page.asked() == []
    assert not page.find(".translation")
    page.open(text=SENTENCE)
    page.one("#source").send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.DELETE)
    page.wait(lambda: not page.find(".translation"))
    assert page.text("#notice") == "The alignment appears here as soon as there is a translation."


def test_settings_are_sent_and_empty_ones_are_the_models_own(page: Page) -> None:
    page.open(text=SENTENCE)
    own = {"nbest": 4, "beam_size": None, "length_penalty": None, "alpha": None}
    assert own.items() <= page.asked()[-1].items()
    page.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.one("#beam_size").get_attribute("placeholder") == "4"
    page.one("#beam_size").send_keys("2")
    page.one("#alpha").send_keys("0.5")
    page.choose("#length_penalty", "gnmt")
    wanted = {"nbest": 2, "beam_size": 2, "length_penalty": "gnmt", "alpha": 0.5}
    page.wait(lambda: wanted.items() <= page.asked()[-1].items())
    page.wait(lambda: len(page.find(".translation")) == 2)


def test_examples_and_models_are_a_choice(page: Page) -> None:
    page.open()
    page.find(".example")[0].click()
    page.wait(lambda: page.best() == "un petit chien voit le maison rouge")
    page.choose("#model", "local")
    page.wait(lambda: page.best() == "une menu cabot regarde la demeure vermeil")
    assert page.asked()[-1]["model"] == "local"
    assert "luong_local_p · 12.3 M parameters · BLEU 40.1" in page.text("#about")


def test_an_error_stands_by_the_field_in_the_services_words(page: Page) -> None:
    page.open(text=SENTENCE)
    page.knobs.failures.append(Failure(400, "the text has 300 tokens, but may have at most 256"))
    page.one("#source").send_keys("s")
    page.wait(lambda: page.text("#error") == "the text has 300 tokens, but may have at most 256")
    assert page.one("#error").get_attribute("role") == "alert"
    assert page.best() == TRANSLATION  # the last one that could be made
    page.one("#source").send_keys(Keys.BACKSPACE)
    page.wait(lambda: page.text("#error") == "")


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_service_is_asked_again_when_it_says(page: Page, status: int) -> None:
    page.open()
    page.knobs.failures.append(Failure(status, "too busy", retry_after=1))
    moments: list[float] = []
    page.knobs.latency = lambda _: moments.append(time.monotonic()) or 0.0
    page.js(
        "window.told = []; new MutationObserver(() => told.push(document.getElementById('error').textContent))"
        ".observe(document.getElementById('error'), {childList: true, characterData: true, subtree: true})"
    )
    page.type("A man")
    page.wait(lambda: page.best() == "un homme")
    assert "too busy. Trying again in 1 s." in page.js("return told")
    assert moments[1] - moments[0] > 0.9
    assert page.text("#error") == ""
    assert len(page.asked()) == 2


def test_a_lost_connection_is_said_and_tried_again(page: Page) -> None:
    page.open()
    page.knobs.dropping = True
    page.one("#source").send_keys("A man")
    page.wait(lambda: page.text("#error").startswith("No connection to the service. Trying again in"))
    page.knobs.dropping = False
    page.wait(lambda: page.best() == "un homme")
    assert page.text("#error") == ""


def test_a_token_is_asked_for_once_and_never_in_the_link(page: Page) -> None:
    page.open()
    page.knobs.token = "se cret"
    page.visit(text="A man")
    page.chrome.refresh()
    page.wait(lambda: page.one("#token-form").is_displayed())
    page.one("#token").send_keys("se cret", Keys.ENTER)
    page.wait(lambda: page.best() == "un homme")
    assert not page.one("#token-form").is_displayed()
    page.chrome.refresh()
    page.wait(lambda: page.best() == "un homme")  # kept in the tab
    page.js("sessionStorage.clear()")
    page.chrome.get("about:blank")
    page.visit(text="A man", token="se cret")
    page.wait(lambda: page.best() == "un homme")
    page.wait(lambda: "cret" not in page.chrome.current_url)


def test_a_link_holds_the_view(page: Page) -> None:
    page.open(text="A man in a red hat", model="local", own="un type", view="alignment", unit="words")
    page.wait(lambda: page.find("[role=gridcell]"))
    page.choose("#weights", "saliency")
    page.wait(lambda: "weights=saliency" in page.chrome.current_url)
    link = page.chrome.current_url
    page.open()
    page.chrome.get(link)
    page.wait(lambda: page.best() == "une type en une bonnet vermeil")
    assert page.one("#own").get_attribute("value") == "un type"
    assert page.one("#weights").get_attribute("value") == "saliency"
    assert page.one("[name=unit][value=words]").is_selected()
    page.visit(text="A woman")  # pasted over the address, without loading the page again
    page.wait(lambda: page.best() == "une dame")


@pytest.mark.parametrize("view", ["alignment", "beam", "compare"])
def test_texts_of_strangers_stay_text(page: Page, view: str) -> None:
    page.open(text=HOSTILE, own=HOSTILE, view=view)
    page.wait(lambda: "<script>alert(1)</script>" in page.best())
    assert "\u202eabc" in page.best()
    assert page.js("return document.querySelectorAll('script, img').length") == 1
    selector = {"alignment": ".labels.rows", "beam": ".tree", "compare": ".card .text"}[view]
    page.wait(lambda: page.texts(selector))
    shown = page.text(selector)
    assert "<scri" in shown
    if view != "compare":
        assert "▁U+20" in shown  # named, and perhaps cut
        assert "\u202e" not in shown


@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 900)])
@pytest.mark.parametrize("view", ["alignment", "beam", "compare"])
def test_only_boxes_scroll_sideways(page: Page, width: int, height: int, view: str) -> None:
    text = " ".join([SENTENCE] * 8 + ["Donaudampfschifffahrtsgesellschaft" * 4])
    page.open(width, height, text=text, own=text, view=view)
    page.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    ready = {"alignment": ".links .word", "beam": ".tree .node", "compare": ".card .thumbnail"}[view]
    page.wait(lambda: page.find(ready))
    assert page.js("scrollTo(500, 0); return scrollX") == 0
    assert page.js("return document.documentElement.scrollWidth") <= page.js("return innerWidth") == width


def test_three_hundred_words_are_drawn_and_walked_through(page: Page) -> None:
    page.open(text=" ".join([SENTENCE] * 30), beam_size=1)
    page.wait(lambda: page.find("[role=gridcell]"))
    grid = page.one("[role=grid]")
    assert int(grid.get_attribute("aria-colcount") or 0) == 301
    assert len(page.find("[role=gridcell]")) < 1000
    page.js("arguments[0].focus()", page.cell(0, 0))
    page.press(Keys.PAGE_DOWN)
    assert page.js("return document.activeElement.getAttribute('aria-rowindex')") == "13"
    page.js(
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'End', ctrlKey: true, bubbles: true}))"
    )
    assert page.focused().startswith("</s> from </s>: ")
    box = page.one("#heatmap").rect
    end = page.cell(int(grid.get_attribute("aria-rowcount") or 0) - 1, 300).rect
    assert box["x"] < end["x"] < box["x"] + box["width"]
    assert box["y"] < end["y"] < box["y"] + box["height"]


def test_right_to_left(page: Page) -> None:
    page.open(text="رجل في قبعة")
    page.wait(lambda: page.find(".labels.columns text"))
    assert page.js("return getComputedStyle(document.getElementById('source')).direction") == "rtl"
    labels = "return [...document.querySelectorAll('.labels.columns text')].map(each => each.getAttribute('direction'))"
    assert page.js(labels) == ["rtl"] * 3 + [None]
    assert page.js("return getComputedStyle(document.querySelector('.translation .text')).direction") == "ltr"


CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const bytes = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data]; };
const light = (colour) => { const [r, g, b] = colour.map((byte) => byte / 255)
  .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = (node) => { for (; node; node = node.parentElement) {
  const colour = bytes(getComputedStyle(node).backgroundColor); if (colour[3] === 255) return colour; }
  return bytes(getComputedStyle(document.body).backgroundColor); };
const worst = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || !node.checkVisibility() || node.disabled || node.matches(".space, option, noscript *")) continue;
  const style = getComputedStyle(node);
  const [a, b] = [light(bytes(node instanceof SVGElement ? style.fill : style.color)), light(ground(node))];
  worst.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.textContent.slice(0, 40)]);
}
return worst.sort(([a], [b]) => a - b).slice(0, 3);
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["alignment", "beam", "compare"])
def test_all_text_has_contrast(page: Page, theme: str, view: str) -> None:
    page.open(theme=theme, text=SENTENCE, own="un chien", view=view)
    page.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait(lambda: page.find("#own-probabilities .word"))
    page.wait(lambda: page.find({"alignment": ".links .word", "beam": ".node", "compare": ".thumbnail"}[view]))
    time.sleep(0.2)  # for fading
    worst = page.js(CONTRAST)
    assert worst[0][0] >= 4.5, worst


def test_the_theme_is_the_systems_until_one_chooses(page: Page) -> None:
    page.open()

    def brightness() -> int:
        colour = page.js("return getComputedStyle(document.body).backgroundColor")
        return int(colour.removeprefix("rgb(").split(",")[0])

    page.open(theme="dark", text="A man")
    page.wait(lambda: page.find(".cells .ground"))
    dark = page.one(".cells .ground").get_attribute("fill")
    assert brightness() < 60
    page.one("#theme").click()
    assert brightness() > 200
    page.wait(lambda: page.one(".cells .ground").get_attribute("fill") != dark)
    page.chrome.refresh()
    assert brightness() > 200


def test_it_asks_for_nothing_elsewhere_and_runs_without_errors(page: Page) -> None:
    page.open()
    page.chrome.get_log("browser")
    page.addresses()
    page.open(text=SENTENCE, own="un chien")
    for view in ("beam", "compare", "alignment"):
        page.one(f"#tab-{view}").click()
        time.sleep(0.2)
    page.cell(1, 1).click()
    page.wait(lambda: page.find(".steerings li"))
    page.choose("#weights", "difference")
    page.wait(lambda: "\N{MINUS SIGN}" in page.text("#scale"))
    asked = [address for address in page.addresses() if not address.startswith(("data:", "about:"))]
    assert asked
    assert [address for address in asked if not address.startswith(page.server.url)] == []
    assert page.chrome.get_log("browser") == []
    policy = page.js("return fetch('/').then(each => each.headers.get('Content-Security-Policy'))")
    assert policy.startswith("default-src 'none'; script-src 'self'")
