"""The page at /, in a browser: what is typed, clicked and seen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from tests.support.chromium import Browser, Tab, browsing
from tests.support.serving import END, MODEL, Server, serve
from tests.support.simulated_engine import SimulatedEngine

guard = pytest.importorskip("npu_text.serving.guard", exc_type=ImportError)
HOSTILE = '한글과 😀 <b>bold</b> <img src=x onerror="window.injected=1"> <script>window.injected=1</script> &amp; é'
TALK = "[...document.querySelectorAll('#talk p')].map((line) => [line.className, line.textContent])"
LAST = "document.querySelector('#talk p:last-child').textContent"
BARS = "[...document.querySelectorAll('#lanes b')].map((bar) => parseFloat(bar.style.width))"
IDLE = "document.getElementById('stop').disabled"
COUNT = "Number(document.getElementById('{}').textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[Server]:
    with serve(engine()) as server:
        yield server


def engine() -> SimulatedEngine:
    """Slow enough for an eye."""
    engine = SimulatedEngine(lanes=3, pages=200, page_tokens=16, context=1024)
    engine.chunks, engine.ending, engine.seconds = (32, 512), END, 0.02
    return engine


@contextmanager
def page(browser: Browser, server: Server) -> Iterator[Tab]:
    """The page, when it knows the model."""
    tab = Tab(browser)
    try:
        tab.open(server.url)
        tab.wait(f"document.getElementById('model')?.textContent === '{MODEL}'")
        tab.wait("document.querySelectorAll('#lanes i').length === 3")
        yield tab
    finally:
        tab.close()


def say(server: Server, text: str) -> None:
    """Makes every answer this text, a byte a token."""
    server.engine.script = server.service.vocabulary.encode(text, special=False)


def ask(tab: Tab, text: str) -> None:
    """Types a message and sends it."""
    asked = "document.querySelectorAll('#talk .user').length"
    before = tab.value(asked)
    tab.click("#text")
    tab.type(text)
    tab.enter()
    tab.wait(f"{asked} > {before}")


def wait_until(condition: Callable[[], Any], seconds: float = 5) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_free(server: Server) -> bool:
    status = server.service.core.driver.status()
    return not any(status.lanes) and status.used_pages == 0 and server.service.core.open == 0


def test_an_answer_streams_in_as_text_and_lanes_and_pages_are_live(browser: Browser, server: Server) -> None:
    say(server, HOSTILE)
    with page(browser, server) as tab:
        tab.value(
            "window.seen = [], new MutationObserver(() => seen.push(document.querySelector('#talk .assistant')"
            "?.textContent)).observe(document.getElementById('talk'), {childList: true, subtree: true})"
        )
        usual, server.engine.seconds = server.engine.seconds, 0.5  # so that it lasts until the page has looked
        ask(tab, "Hallo <i>du</i>")
        tab.wait(f"{BARS}.some((width) => width > 0) && {COUNT.format('used')} > 0")
        assert tab.value("document.getElementById('pages').value") > 0
        server.engine.seconds = usual
        tab.wait(IDLE)
        assert tab.value(TALK) == [["user", "Hallo <i>du</i>"], ["assistant", HOSTILE]]
        seen = list(dict.fromkeys(filter(None, tab.value("seen"))))
        assert len(seen) > 20
        assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
        assert not any("\ufffd" in text for text in seen)
        assert tab.value("document.querySelectorAll('#talk p *').length") == 0
        assert tab.value("window.injected === undefined")
        tab.wait(f"{BARS}.every((width) => width === 0) && {COUNT.format('used')} === 0")
        assert tab.value(COUNT.format("all")) == server.engine.pages
        assert tab.value(COUNT.format("kept")) > 0
        assert tab.complaints() == []


def test_the_conversation_goes_on_and_the_keyboard_does_what_people_expect(browser: Browser, server: Server) -> None:
    say(server, "Ja")
    with page(browser, server) as tab:
        tab.value(
            "window.sent = [], window.plain = fetch, window.fetch = (to, what) => "
            "(what?.body && sent.push(JSON.parse(what.body).messages), plain(to, what))"
        )
        tab.click("#text")
        tab.enter()  # nothing to send
        tab.type("one")
        tab.enter(shift=True)  # a new line
        tab.type("two")
        tab.call("Input.imeSetComposition", text="한", selectionStart=1, selectionEnd=1)
        tab.enter()  # ends the character that is being composed
        tab.call("Input.insertText", text="한")
        assert tab.value(TALK) == []
        tab.click("#send")
        tab.wait(f"{IDLE} && {TALK}.length === 2")
        ask(tab, "three")
        tab.wait(f"{IDLE} && {TALK}.length === 4")
        first = {"role": "user", "content": "one\ntwo한"}
        second = [{"role": "assistant", "content": "Ja"}, {"role": "user", "content": "three"}]
        assert tab.value("sent") == [[first], [first, *second]]
        assert tab.complaints() == []


def test_stopping_and_leaving_free_the_lane(browser: Browser, server: Server) -> None:
    say(server, "long " * 150)
    with page(browser, server) as tab:
        ask(tab, "Tell me")
        tab.wait(f"{LAST}.length > 10")
        tab.click("#stop")
        wait_until(lambda: is_free(server), 2)
        tab.wait(IDLE)
        kept = tab.value(LAST)
        assert [kind for kind, _ in tab.value(TALK)] == ["user", "assistant"]
        assert ("long " * 150).startswith(kept)
        say(server, "Good.")
        ask(tab, "And now?")
        tab.wait(f"{IDLE} && {LAST} === 'Good.'")
        say(server, "long " * 150)
        ask(tab, "Again")
        tab.wait(f"{LAST}.length > 10")
        assert tab.complaints() == []
    wait_until(lambda: is_free(server), 5)


def test_who_has_a_key_gives_it(browser: Browser) -> None:
    with serve(engine(), guard=guard.GuardOptions(keys=("secret",))) as own:
        say(own, "Welcome")
        tab = Tab(browser)
        tab.open(own.url)
        tab.wait("document.getElementById('trouble')?.textContent.includes('key')")
        time.sleep(1.2)  # looks come twice a second
        assert len(tab.complaints()) == 1, "a server that asked for a key is not asked on and on"
        tab.click("#key")
        tab.type("secret")
        tab.enter()
        tab.wait(f"document.getElementById('model').textContent === '{MODEL}'")
        ask(tab, "Hello")
        tab.wait(f"{IDLE} && {LAST} === 'Welcome'")
        tab.close()


def test_errors_are_shown_and_the_talk_goes_on_without_what_failed(browser: Browser, server: Server) -> None:
    say(server, "Fine")
    with page(browser, server) as tab:
        ask(tab, "x" * 2000)
        tab.wait(f"{IDLE} && {LAST}.includes('at most 1024 tokens')")
        end = "(({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight)"
        assert tab.value(f"{end}(document.getElementById('talk'))") < 2, "what is new is not in sight"
        ask(tab, "Short")
        tab.wait(f"{IDLE} && {LAST} === 'Fine'")


def test_a_server_that_is_gone_and_back_is_seen(browser: Browser, server: Server) -> None:
    with page(browser, server) as tab:
        tab.value("window.plain = fetch, window.fetch = () => Promise.reject(new TypeError('gone'))")
        tab.wait("document.getElementById('waiting').textContent === '?'")
        tab.value("window.fetch = plain")
        tab.wait(f"{COUNT.format('all')} === {json.dumps(server.engine.pages)}")
        tab.wait("document.getElementById('waiting').textContent === '0'")
        assert tab.complaints() == []


def test_a_device_that_fails_is_seen(browser: Browser) -> None:
    with serve(engine()) as own, page(browser, own) as tab:
        say(own, "long " * 150)
        ask(tab, "Hello")
        tab.wait(f"{LAST}.length > 10")
        own.engine.fails = True
        tab.wait(f"{IDLE} && document.querySelector('#talk .error') !== null")
        tab.wait("document.getElementById('trouble').textContent.includes('the device is gone')")
        tab.wait(f"{BARS}.every((width) => width === 0)")
