"""The page in a browser, before a stub of its service."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlencode

from browser import headless_chromium
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from stub_server import Knobs, StubServer

SENTENCE = "A man in a red hat sees a small dog"
TRANSLATION = "un homme dans un chapeau rouge voit un petit chien"

T = TypeVar("T")


class Page:
    def __init__(self, chrome: webdriver.Chrome, server: StubServer) -> None:
        self.chrome = chrome
        self.server = server

    @property
    def knobs(self) -> Knobs:
        return self.server.knobs

    def open(self, width: int = 1280, height: int = 900, theme: str = "light", **state: object) -> None:
        """As a visitor for the first time, with the state that a link holds; waits for the translation of its text."""
        if self.chrome.current_url.startswith(self.server.url):
            self.js("sessionStorage.clear(); localStorage.clear()")
        self.chrome.get("about:blank")
        self.server.knobs = Knobs()
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.visit(**state)
        self.wait(lambda: self.find("#model option"))
        if state.get("text"):
            self.wait(lambda: self.find(".translation"))

    def visit(self, **state: object) -> None:
        self.chrome.get(f"{self.server.url}#{urlencode(state, doseq=True)}")

    def wait(self, condition: Callable[[], T], seconds: float = 20) -> T:
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, "the page did not come to this"
            time.sleep(0.02)
        return value

    def js(self, script: str, *values: object) -> Any:  # noqa: ANN401
        return self.chrome.execute_script(script, *values)

    def find(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Also of what is hidden; read at once, because the page may draw anew meanwhile."""
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
        return list(self.js(script, selector))

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def best(self) -> str:
        return (self.texts(".translation .text") or [""])[0]

    def cell(self, row: int, column: int) -> WebElement:
        """Of the heatmap, from 0."""
        return self.one(f"[role=gridcell][aria-rowindex='{row + 1}'][aria-colindex='{column + 1}']")

    def label(self, row: int, column: int) -> str:
        """Of a cell of the heatmap, read at once, because the page may draw anew meanwhile; "" while there is none."""
        cell = f"[role=gridcell][aria-rowindex='{row + 1}'][aria-colindex='{column + 1}']"
        return str(self.js("return document.querySelector(arguments[0])?.ariaLabel ?? ''", cell))

    def type(self, text: str) -> None:
        """Add to the source as one input, like pasting: single keys might be sent with a pause between them."""
        self.js(
            "const field = document.getElementById('source'); field.value += arguments[0];"
            "field.dispatchEvent(new InputEvent('input'))",
            text,
        )

    def point_at(self, element: WebElement) -> None:
        ActionChains(self.chrome, duration=0).move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.chrome, duration=0).send_keys(*keys).perform()

    def choose(self, select: str, value: str) -> None:
        self.one(f"{select} option[value='{value}']").click()

    def tick(self, name: str, value: str) -> None:
        self.js("document.querySelector(`[name='${arguments[0]}'][value='${arguments[1]}']`).click()", name, value)

    def focused(self) -> str:
        return str(self.js("return document.activeElement.ariaLabel || document.activeElement.id"))

    def asked(self, path: str = "/v1/translate") -> list[dict[str, Any]]:
        return [body for asked, body in list(self.knobs.asked) if asked == path]

    def addresses(self) -> list[str]:
        """All that the browser has requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]


@contextmanager
def served_page() -> Iterator[Page]:
    with StubServer() as server, headless_chromium() as chrome:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield Page(chrome, server)
        server.shutdown()
