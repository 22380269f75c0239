"""The page of a comparison: its content, and how it behaves in a browser."""

import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import headless_chromium, set_screen
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from nmt.compare.pictures import draw
from nmt.compare.report import page

TESTS = ("difference", "difference_ci", "p", "p_raw", "detectable", "seeds_needed")
HOSTILE = "\"'><img/src=x><script>alert(1)</script>&lt;{{7*7}}\u202e</style></title>"


def system(rank: int, name: str, **changes: object) -> dict[str, Any]:
    points = [(1.0, 9.0), (2.0, 20.0 - rank)]
    return {
        **{"rank": rank, "name": name, "seeds": [1, 2], "bleu": 36.0 - rank, "bleu_sd": 0.25, "bleu_ci": 1.05},
        **{"chrf": 60.0, "chrf_sd": None, "ter": 49.0, "ter_sd": None, "aer": None, "perplexity": None},
        **{"difference": 1.25, "difference_ci": 0.75, "p": 0.0004, "p_raw": 0.0002, "detectable": 0.875},
        **{"seeds_needed": math.inf, "parameters": 1_250_000, "seconds": 200.0 + rank, "cost_seconds": 180.0 + rank},
        **{"update_milliseconds": 90.0, "tokens_per_second": 5200.0, "sentences_per_second": None},
        **{"equal_updates": 20.0 - rank, "equal_time": 18.0 - rank, "longest": 30.0, "longest_words": [5, 5]},
        "by_length": [{"words": words, "sentences": 3, "score": 40.0 - rank - words[0]} for words in ([1, 4], [5, 5])],
        "curve": [{"updates": 500 * e, "epoch": e, "seconds": 90 * e + rank, "score": bleu} for e, bleu in points],
        **changes,
    }


def translation(name: str, text: str, source: str, *weights: list[int]) -> dict[str, Any]:
    alignment = {"source": source.split(), "target": text.split(), "weights": weights} if weights else None
    return {"system": name, "run": f"outputs/{name}", "score": 43.2, "text": text, "alignment": alignment}


def comparison(text: str = "Mann", **changes: object) -> dict[str, Any]:
    """Make a comparison of three systems, of which the last has only its output. `text` stands in places that untrusted
    users fill."""
    unknown = dict.fromkeys(["parameters", "seconds", "tokens_per_second", "bleu_sd", "cost_seconds"])
    systems = [
        system(1, "dot"),
        system(2, "base", **dict.fromkeys(TESTS), parameters=900_000),
        system(3, text, seeds=[None], curve=[], p=0.2, **unknown),
    ]
    scores = {"bleu": 33.0, "bleu_ci": 1.1, "chrf": 60.0, "chrf_ci": None, "ter": 49.0, "ter_ci": None, "aer": 12.3}
    tests = {"p_bootstrap": 0.2, "p_randomisation": 0.3, "baseline_run": "outputs/base"}
    source = f"A {text} is </s>"
    translations = [
        translation("dot", f"Ein {text} </s>", source, [90, 7, 3, 0], [4, 80, 16, 0], [0, 0, 1, 99]),
        translation("base", "Ein Tier </s>", f"a {text} is </s>", [98, 1, 1, 0], [1, 97, 2, 0], [0, 0, 0, 100]),
        translation(text, f"Der {text}", source),
        translation("dot", "رجل في </s>", source, [1, 99, 0, 0], [0, 8, 92, 0], [0, 0, 0, 100]),
    ]
    example = {"number": 17, "source": f"A {text} is", "reference": f"Ein {text}", "translations": translations}
    return {
        **{"split": "test", "sentences": 1000, "baseline": "base", "metric": "bleu", "missing": [], "comparisons": 2},
        "unequal": [],
        "signatures": {"bleu": f"nrefs:1|{text}", "chrf": "c", "ter": "t"},
        **{"bootstrap_samples": 1000, "randomisation_trials": 10000, "systems": systems, "examples": [example]},
        **{"budget": {"updates": 1000, "seconds": 181.0}, "machines": ["a CPU"]},
        "differences": [
            {"system": row["name"], "baseline": "base", **{key: row[key] for key in TESTS}} for row in systems[::2]
        ],
        "runs": [{"system": text, "seed": None, "run": f"outputs/{text}", **scores, **tests}],
        **changes,
    }


def rendered(given: dict[str, Any]) -> str:
    return page(given, draw(given))


class Parsed(HTMLParser):
    """The parsed page: elements with the names of their attributes, values of attributes, and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.values: list[str] = []
        self.texts: list[str] = []
        self.feed(html.replace("<wbr>", ""))  # allowed line breaks within names

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attributes)))
        self.values += [value or "" for _, value in attributes]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_text_of_strangers_stays_text() -> None:
    plain = "M" * len(HOSTILE)
    harmless, hostile = (Parsed(rendered(comparison(text, unequal=[text]))) for text in (plain, HOSTILE))
    assert hostile.elements == harmless.elements
    assert sum(HOSTILE in text for text in hostile.texts) == sum(plain in text for text in harmless.texts) > 10
    assert f"outputs/{HOSTILE}" in hostile.values
    assert any(text.startswith(f"The seeds of {HOSTILE} vary more than twice") for text in hostile.texts)


def test_the_page_loads_nothing() -> None:
    parsed = Parsed(rendered(comparison()))
    assert not {"src", "href", "action", "srcset", "data"} & {name for _, *names in parsed.elements for name in names}
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    assert any(value.startswith(policy) for value in parsed.values)
    assert not any(word in text for text in parsed.texts for word in ("url(", "@import", "fetch("))


def test_columns_and_charts_of_which_nothing_is_known_are_left_out() -> None:
    texts = Parsed(rendered(comparison())).texts
    charts = {"BLEU: difference to base, with 95 % intervals", "Learning curves", "BLEU against training time"}
    assert {"BLEU", "parameters", "raw p", *charts} <= set(texts)
    assert texts.count("AER %") == 1  # only the table of single runs has it
    assert "sentences/s, search" not in texts
    systems = comparison()["systems"]
    unknown = dict.fromkeys([*TESTS, "seconds", "cost_seconds", "bleu_sd"])
    bare = [row | unknown | {"curve": [], "by_length": []} for row in systems]
    rest = Parsed(rendered(comparison(systems=bare, differences=[], runs=[], examples=[]))).texts
    absent = {"raw p", "difference", "training time", "Charts", "Examples", "compared with", *charts}
    assert not absent & set(rest)
    assert not any("Detects" in text for text in rest)


def test_cells() -> None:
    texts = Parsed(rendered(comparison())).texts
    numbers = {"35.00", "± 1.05", "+1.25", "± 0.75", "0.88", "inf", "1.2 M", "3 min 21 s", "5,200", "2"}
    assert {*numbers, "1,000 sentences"} <= {part for text in texts for part in (text, text.partition(": ")[2])}
    stars = [texts[index - 1] for index, text in enumerate(texts) if text == "*"]
    assert stars == ["0.0004"]
    full = [text for text in texts if text]
    first, second = (index for index, text in enumerate(full) if text == "baseline")
    assert (full[first + 1], full[second - 1]) == ("base", "base")


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with headless_chromium() as chrome:
        yield chrome


@pytest.fixture
def chrome(browser: webdriver.Chrome, tmp_path: Path) -> webdriver.Chrome:
    """Open the page in a desktop-sized window with the light theme."""
    (tmp_path / "index.html").write_text(rendered(comparison()), encoding="utf-8")
    set_screen(browser, 1280, 900)
    browser.get_log("performance")
    browser.get((tmp_path / "index.html").as_uri())
    return browser


def find(chrome: webdriver.Chrome, selector: str) -> list[WebElement]:
    return chrome.find_elements(By.CSS_SELECTOR, selector)


def words(chrome: webdriver.Chrome, number: int) -> list[WebElement]:
    """Find the words of translation `number`, from 0, of the first example."""
    return find(chrome, ".target")[number].find_elements(By.CSS_SELECTOR, ".word")


def lit(chrome: webdriver.Chrome, source: str) -> list[float]:
    """Return the opacity of the colour of each source word."""
    script = "return [...document.querySelector(arguments[0]).children].map(each => getComputedStyle(each).background)"
    colours = [re.search(r"/ ([\d.]+)\)|rgba\(0, 0, 0, (0)\)", each) for each in chrome.execute_script(script, source)]
    return [float(colour[1] or colour[2]) if colour else 1.0 for colour in colours]


@pytest.mark.slow
def test_pointing_at_a_word_lights_up_what_it_attended_to(chrome: webdriver.Chrome) -> None:
    shared, own, readout = ".original .source", ".source.own", find(chrome, ".readout")[0]
    before = find(chrome, ".translation")[0].rect
    ActionChains(chrome).move_to_element(words(chrome, 0)[1]).perform()
    a, mann, is_, end = lit(chrome, shared)
    assert 1 > mann > is_ > a > end == 0
    assert readout.text == "Mann ← Mann 80 %, is 16 %, A 4 %"
    assert find(chrome, ".translation")[0].rect == before
    assert lit(chrome, own) == [0] * 4
    ActionChains(chrome).move_to_element(words(chrome, 1)[1]).perform()  # a system with another source text
    assert lit(chrome, shared) == [0] * 4
    assert max(lit(chrome, own)) == lit(chrome, own)[1] > 0.9
    ActionChains(chrome).move_to_element(find(chrome, "h1")[0]).perform()
    assert lit(chrome, shared) == lit(chrome, own) == [0] * 4
    assert readout.text == ""


@pytest.mark.slow
def test_the_keyboard_goes_through_the_words(chrome: webdriver.Chrome) -> None:
    first, second, _ = words(chrome, 0)
    chrome.execute_script("arguments[0].focus()", first)
    assert lit(chrome, ".original .source")[0] == max(lit(chrome, ".original .source")) > 0
    ActionChains(chrome).send_keys(Keys.ARROW_RIGHT).perform()
    assert chrome.switch_to.active_element == second
    assert lit(chrome, ".original .source")[1] == max(lit(chrome, ".original .source"))
    ActionChains(chrome).send_keys(Keys.TAB).perform()
    assert chrome.switch_to.active_element == words(chrome, 1)[0]
    ActionChains(chrome).key_down(Keys.SHIFT).send_keys(Keys.TAB).perform()
    assert chrome.switch_to.active_element == second  # the word that had the focus before
    ActionChains(chrome).key_up(Keys.SHIFT).perform()


@pytest.mark.slow
def test_headings_sort(chrome: webdriver.Chrome) -> None:
    table = find(chrome, "table")[0]

    def order() -> list[str]:
        return [name.text for name in table.find_elements(By.CSS_SELECTOR, "tbody bdi")]

    rank, name, parameters = (
        table.find_element(By.XPATH, f".//th[.='{heading}']") for heading in ("#", "system", "parameters")
    )
    assert order() == ["dot", "base", "Mann"]
    name.click()
    name.click()
    assert order() == ["Mann", "dot", "base"]
    parameters.click()
    assert order() == ["base", "dot", "Mann"]
    assert [each.get_attribute("aria-sort") for each in (rank, name, parameters)] == ["none", "none", "ascending"]
    parameters.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert order() == ["dot", "base", "Mann"]  # unknown values stay last
    assert parameters.get_attribute("aria-sort") == "descending"


@pytest.mark.slow
@pytest.mark.parametrize("selector", [".legend button", "tbody tr", ".chart [data-system]"])
def test_a_system_is_set_off_in_all_charts(chrome: webdriver.Chrome, selector: str) -> None:
    parts = "[...document.querySelectorAll('.comparison:first-of-type .chart [data-system]')]"
    chrome.execute_script(f"for (const part of {parts}) part.style.transition = 'none'")
    state = f"return {parts}.map(part => [part.dataset.system, getComputedStyle(part).opacity < 0.5])"
    chosen = find(chrome, selector)[1]
    number = chosen.get_attribute("data-system")
    ActionChains(chrome).move_to_element(chosen).perform()
    faded = chrome.execute_script(state)
    assert len({system for system, _ in faded}) == 3
    assert all(is_faded == (system != number) for system, is_faded in faded)
    ActionChains(chrome).move_to_element(find(chrome, "h2")[0]).perform()
    assert not any(is_faded for _, is_faded in chrome.execute_script(state))
