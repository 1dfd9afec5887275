"""The thread of an engine, and what it tells of its texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Event as Flag

import pytest

from npu_text.batching.driver import Driver
from npu_text.batching.engine import LaneSampling
from npu_text.batching.texts import Event, Text, TextRequest, Turn
from tests.support.simulated_engine import SimulatedEngine

PENALISED = LaneSampling(frequency_penalty=0.5)


class Told:
    """What a driver told of each text."""

    def __init__(self, texts: int) -> None:
        self.tokens: dict[Text, list[int]] = {}
        self.finishes: dict[Text, str] = {}
        self.all = Flag()
        self._texts = texts

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.text not in self.finishes, "news behind the end"
            self.tokens.setdefault(event.text, []).extend(chosen.token for chosen in event.chosen)
            if event.finish:
                self.finishes[event.text] = event.finish
        if len(self.finishes) == self._texts:
            self.all.set()


def requests(count: int) -> list[TextRequest]:
    return [TextRequest((number, number + 1), 5 + 7 * number) for number in range(count)]


@pytest.mark.parametrize("penalised", [(), (0,), (2,), (1, 3)])
def test_all_tokens_are_told(penalised: Sequence[int]) -> None:
    """Also when steps cease to be asked for ahead, since the last token of a text that joins has to be known."""
    engine, told = SimulatedEngine(lanes=2), Told(5)
    driver = Driver(engine, told)
    driver.start()
    asked = [
        replace(request, sampling=PENALISED) if number in penalised else request
        for number, request in enumerate(requests(5))
    ]
    texts = driver.submit(*asked)
    assert told.all.wait(30)
    driver.stop()
    for text in texts:
        assert told.tokens[text] == text.tokens[2:]
        assert told.finishes[text] == "length"


def test_who_has_ended_is_told_so_when_the_device_fails() -> None:
    """Its news wait for the next launch, which fails."""
    engine, told = SimulatedEngine(), Told(2)

    def observe(turn: Turn, seconds: float) -> None:
        engine.fails = any(text.finish for text in turn.running)

    driver = Driver(engine, told, observe=observe)
    short, long = driver.submit(*requests(2))
    driver.start()
    assert told.all.wait(30)
    driver.stop()
    assert told.finishes == {short: "length", long: "failed"}
    assert told.tokens[short] == short.tokens[2:]
