"""The page in a browser, with a service for two small models."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import numpy as np
import pytest
from browser import headless_chromium, set_screen
from rapidfuzz.distance import LCSseq
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from served import LOADING, Process, process, trained

from nmt import Translator
from nmt.data.word_alignment import merge_to_words, words, words_of_pieces
from nmt.explain.explanation import explain

pytestmark = pytest.mark.slow
LINE = "a small dog sees the red house ."
HOSTILE = "<script>alert(1)</script> \u202eabc <img/src=x> &lt; {{7*7}}"
# View -> selector of elements that exist once the view is drawn.
READY = {"alignment": ".links .word", "beam": ".tree .node", "compare": ".card .text"}
PIECES = [
    ["▁Un", "▁cha", "peau", "</s>"],
    ["<unk>", "▁", "a", "▁b▁c", "d", "</s>", "e"],
    ["▁日本", "語", "の", "文", "</s>"],
    ["▁a", "▁", "▁b", "</s>"],
    ["</s>"],
]

T = TypeVar("T")


class Page:
    def __init__(self, chrome: webdriver.Chrome, address: str) -> None:
        self.chrome, self.address = chrome, address

    def open(self, width: int = 1280, height: int = 900, theme: str = "light", **state: object) -> None:
        """Open the page without stored settings, with the state of a link, and wait for its text's translation."""
        if self.chrome.current_url.startswith(self.address):
            self.js("sessionStorage.clear(); localStorage.clear()")
        self.chrome.get("about:blank")
        set_screen(self.chrome, width, height, theme)
        for log in ("browser", "performance"):
            self.chrome.get_log(log)
        self.visit(**state)
        self.wait(lambda: self.find("#model option"))
        if state.get("text"):
            self.wait(lambda: self.find(".translation"))

    def visit(self, **state: object) -> None:
        self.chrome.get(f"{self.address}/#{urlencode(state, doseq=True)}")

    def wait(self, condition: Callable[[], T], seconds: float = 30) -> T:
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, "the page did not come to this"
            time.sleep(0.02)
        return value

    def js(self, script: str, *values: object) -> Any:  # noqa: ANN401
        return self.chrome.execute_script(script, *values)

    def called(self, module: str, expression: str, *values: object) -> Any:  # noqa: ANN401
        """Evaluate a JavaScript expression of the imported module `m` and the values `v`."""
        script = f"const v = [...arguments], done = v.pop(); import('/static/{module}').then(m => done({expression}))"
        return self.chrome.execute_async_script(script, *values)

    def find(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all matching elements, hidden ones too, in one call: the page may redraw meanwhile."""
        return list(self.js("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector))

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def best(self) -> str:
        return (self.texts(".translation .text") or [""])[0]

    def cell(self, row: int, column: int) -> str:
        """Return the selector of a cell of the heatmap; row and column count from 0."""
        return f"[role=gridcell][aria-rowindex='{row + 1}'][aria-colindex='{column + 1}']"

    def weight(self, row: int, column: int) -> float:
        """Return the weight of a cell; NaN while the page redraws the table."""
        label = str(self.js("return document.querySelector(arguments[0])?.ariaLabel ?? ''", self.cell(row, column)))
        return float(label.rpartition(" ")[2] or "nan")

    def press_at(self, row: int, column: int, *keys: str) -> None:
        """Press keys at a cell of the heatmap."""
        self.js("document.querySelector(arguments[0]).focus()", self.cell(row, column))
        self.press(*keys)

    def fill(self, text: str) -> None:
        """Replace the source as a user's typing would."""
        field = "const field = document.getElementById('source'); field.value = arguments[0];"
        self.js(f"{field} field.dispatchEvent(new InputEvent('input'))", text)

    def press(self, *keys: str) -> None:
        ActionChains(self.chrome, duration=0).send_keys(*keys).perform()

    def choose(self, select: str, value: str) -> None:
        self.one(f"{select} option[value='{value}']").click()

    def requests(self) -> list[dict[str, Any]]:
        """Return the browser's requests since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        return [event["params"]["request"] for event in events if event["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("page") / "local", "attention=luong_local_p")


@pytest.fixture(scope="module")
def chrome() -> Iterator[webdriver.Chrome]:
    with headless_chromium() as chrome:
        yield chrome


@pytest.fixture(scope="module")
def service(local: Path) -> Iterator[Process]:
    with process(local.parent, f"run=[demo,{local}]") as started:
        yield started


@pytest.fixture
def page(chrome: webdriver.Chrome, service: Process) -> Page:
    page = Page(chrome, service.address)
    page.open(text=LINE)
    page.wait(lambda: page.find("[role=gridcell]"))
    return page


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load("demo", **LOADING)


def test_it_shows_the_translation_and_its_attention(page: Page, translator: Translator) -> None:
    (own,) = translator.translate([LINE])
    assert page.best() == own.text
    assert own.alignment is not None
    for row, column in ((0, 0), (1, 2)):
        expected = own.alignment[row, column]
        page.wait(lambda: np.isclose(page.weight(row, column), expected, atol=0.001))  # noqa: B023
    assert "BLEU" in page.text("#about")
    ActionChains(page.chrome, duration=0).move_to_element(page.one(page.cell(1, 1))).perform()
    assert page.text("#readout").startswith("▁petit ← ▁small ")
    assert (page.texts(".labels.rows .lit"), page.texts(".labels.columns .lit")) == (["▁petit"], ["▁small"])
    page.press_at(0, 0, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert page.js("return document.activeElement.ariaLabel").startswith("▁petit from ▁small: ")


def test_it_translates_after_a_pause_and_not_each_key(page: Page, translator: Translator) -> None:
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
    page.requests()
    page.chrome.execute_async_script(typing, LINE)
    page.wait(lambda: page.best() == translator.translate([LINE])[0].text)
    asked = [json.loads(request["postData"]) for request in page.requests() if request["url"].endswith("/v1/translate")]
    assert [body["text"] for body in asked] == [LINE]


def test_a_steered_step_attends_there(page: Page, translator: Translator) -> None:
    (own,) = translator.translate([LINE])
    last = len(own.source_tokens) - 1
    page.press_at(1, last, Keys.ENTER)
    page.wait(lambda: page.weight(1, last) == 1)
    (steered,) = translator.translate([LINE], prefix=own.tokens[:1], attend={1: last})
    page.wait(lambda: page.best() == steered.text)
    assert "attends to" in page.text("#steerings")
    page.one("#steerings li button").click()
    page.wait(lambda: page.best() == own.text)


def test_saliency_and_window_come_from_the_service(page: Page, translator: Translator) -> None:
    page.choose("#weights", "saliency")
    expected = explain(translator, LINE, translator.translate([LINE])[0].tokens)
    assert expected.saliency is not None
    page.wait(lambda: np.isclose(page.weight(0, 0), expected.saliency[0, 0], atol=0.001))  # type: ignore[index]
    page.choose("#model", "local")
    page.wait(lambda: page.one("#overlay-choice").is_displayed())


def test_a_translation_of_ones_own_is_scored_and_explained(page: Page, translator: Translator) -> None:
    own = "le Ж chien"  # contains an unknown character
    page.one("#own").send_keys(own)
    (scored,) = translator.score([LINE], [own])
    page.wait(lambda: f"{abs(scored.log_prob):.3f}" in "".join(page.texts("#own-probabilities")))
    page.choose("#weights", "saliency")
    if not page.one("#show-own").is_selected():
        page.one("#show-own").click()
    expected = explain(translator, LINE, own).saliency
    assert expected is not None
    last = expected.shape[0] - 1
    page.wait(lambda: np.isclose(page.weight(last, 0), expected[last, 0], atol=0.001))


def test_the_tree_and_the_models_side_by_side(page: Page, local: Path, translator: Translator) -> None:
    page.one("#tab-beam").click()
    page.wait(lambda: page.find(".tree .node"))
    path = "".join(page.texts(".tree .node.chosen .token")).replace("▁", " ").removesuffix("</s>").strip()
    assert path == translator.translate([LINE])[0].text
    page.one("#tab-compare").click()
    other = Translator.load(local, **LOADING).translate([LINE])[0]
    page.wait(lambda: other.text in " ".join(" ".join(page.texts("#compare-cards")).split()))


def test_an_error_stands_by_the_field_in_the_services_words(page: Page, translator: Translator) -> None:
    page.open(text=LINE)
    page.fill("word " * 600)
    page.wait(lambda: page.text("#error").startswith("text 1: has "))
    assert page.best() == translator.translate([LINE])[0].text  # the last translation stays
    page.fill(LINE)
    page.wait(lambda: page.text("#error") == "")


def test_a_token_is_asked_for_once_and_never_in_the_link(chrome: webdriver.Chrome, tmp_path: Path) -> None:
    with process(tmp_path, environment={"NMT_SERVE_TOKEN": "se cret"}) as started:
        page = Page(chrome, started.address)
        page.visit(text=LINE)
        page.wait(lambda: page.one("#token-form").is_displayed())
        page.one("#token").send_keys("se cret", Keys.ENTER)
        page.wait(page.best)
        assert not page.one("#token-form").is_displayed()
        page.chrome.refresh()
        page.wait(page.best)  # the tab has stored the token
        page.js("sessionStorage.clear()")
        page.chrome.get("about:blank")
        page.visit(text=LINE, token="se cret")
        page.wait(page.best)
        page.wait(lambda: "cret" not in page.chrome.current_url)


def test_a_link_holds_the_view(page: Page) -> None:
    page.open(text=LINE, model="local", own="un chat", view="alignment", unit="words")
    page.wait(lambda: page.find("[role=gridcell]"))
    page.choose("#weights", "saliency")
    page.wait(lambda: "weights=saliency" in page.chrome.current_url)
    link = page.chrome.current_url
    page.open()
    page.chrome.get(link)
    page.wait(page.best)
    values = {selector: page.one(selector).get_attribute("value") for selector in ("#own", "#weights", "#model")}
    assert values == {"#own": "un chat", "#weights": "saliency", "#model": "local"}
    assert page.one("[name=unit][value=words]").is_selected()


@pytest.mark.parametrize("view", READY)
def test_texts_of_strangers_stay_text(page: Page, view: str) -> None:
    page.open(text=HOSTILE, own=HOSTILE, view=view)
    page.wait(lambda: page.find(READY[view]))
    assert page.js("return document.querySelectorAll('script, img').length") == 1
    if view == "alignment":
        assert "\u202e" not in page.text(".labels.columns")  # the page shows its number instead


@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 900)])
@pytest.mark.parametrize("view", READY)
def test_only_boxes_scroll_sideways(page: Page, width: int, height: int, view: str) -> None:
    text = " ".join([LINE] * 8 + ["Donaudampfschifffahrtsgesellschaft" * 2])
    page.open(width, height, text=text, own=text, view=view)
    page.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait(lambda: page.find(READY[view]))
    assert page.js("scrollTo(500, 0); return scrollX") == 0
    assert page.js("return document.documentElement.scrollWidth") <= page.js("return innerWidth") == width


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
@pytest.mark.parametrize("view", READY)
def test_all_text_has_contrast(page: Page, theme: str, view: str) -> None:
    page.open(theme=theme, text=LINE, own="un chien", view=view)
    page.wait(lambda: page.find("#own-probabilities .word") and page.find(READY[view]))
    time.sleep(0.2)  # until elements have faded in
    worst = page.js(CONTRAST)
    assert worst[0][0] >= 4.5, worst


def test_nothing_else_is_asked_and_nothing_is_complained_of(page: Page) -> None:
    for view in ("beam", "compare", "alignment"):
        page.one(f"#tab-{view}").click()
        page.wait(lambda view=view: page.find(READY[view]))
    addresses = [request["url"] for request in page.requests() if request["url"].startswith("http")]
    assert addresses
    assert [address for address in addresses if not address.startswith(page.address)] == []
    assert page.chrome.get_log("browser") == []


@pytest.mark.parametrize("target", PIECES)
@pytest.mark.parametrize("source", PIECES[:3])
def test_words_are_merged_as_the_metrics_do(page: Page, target: list[str], source: list[str]) -> None:
    weights = np.random.default_rng(1).dirichlet(np.ones(len(source)), len(target))
    merged = page.called("words.js", "m.mergeToWords(...v)", weights.tolist(), target, source)
    np.testing.assert_allclose(merged, merge_to_words(weights, target, source))
    assert page.called("words.js", "m.wordsOfPieces(...v)", target) == words_of_pieces(target)
    assert page.called("words.js", "m.wordTexts(...v)", target) == words(target)


@pytest.mark.parametrize(
    ("pieces", "others", "shown"),
    [
        (["▁", "i", "j", "▁", "e", "</s>"], ["▁s", "</s>"], ["␣", "i", "j", "␣", "e", "</s>"]),
        (["▁s", "▁tʃ", "<unk>", "</s>"], ["▁", "i", "j", "</s>"], ["s", "tʃ", "<unk>", "</s>"]),
        (["▁s", "x", "</s>"], ["▁", "i", "j", "</s>"], ["▁s", "x", "</s>"]),
        (["▁petit", "▁chien"], ["▁small", "▁dog"], ["▁petit", "▁chien"]),
    ],
)
def test_letters_and_whole_symbols_have_no_marks(
    page: Page, pieces: list[str], others: list[str], shown: list[str]
) -> None:
    assert page.called("words.js", "m.pieceTexts(...v)", pieces, others) == shown
    steps = [[{"parent": step and 0, "token": piece, "log_prob": -1}] for step, piece in enumerate(pieces)]
    steps[0][0]["parent"] = None
    assert page.called("tree.js", "m.nodesOf(...v).flat().map((node) => node.text)", steps, others) == shown


def test_what_is_not_marked_is_the_longest_common_subsequence(page: Page) -> None:
    random = np.random.default_rng(2)
    pairs = [["".join(random.choice(list("abc"), size)) for size in random.integers(0, 12, 2)] for _ in range(50)]
    marks = page.called("diff.js", "v[0].map(([a, b]) => m.differences([...a], [...b]))", pairs)
    for (a, b), (of_a, of_b) in zip(pairs, marks, strict=True):
        common = [[letter for letter, mark in zip(*side, strict=True) if not mark] for side in ((a, of_a), (b, of_b))]
        assert common[0] == common[1]
        assert len(common[0]) == LCSseq.similarity(a, b)
