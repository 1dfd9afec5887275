"""Prompts that are filled in by a sibling of the device, which does what it is asked for as late as it may."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from threading import Semaphore
from typing import Any

import pytest

from npu_compiler.frontend.decoder_request import BatchRequest
from npu_runtime import Device
from npu_runtime.backend import BoundPlan, Launched, Recording
from npu_text.batching.driver import Driver
from npu_text.batching.engine import Chosen, LaneSampling, Prefill
from npu_text.batching.paged_engine import PagedEngine
from npu_text.batching.texts import Event, TextRequest, Turn
from tests.language.test_paged_engine import Text, go_on, one_step, prompt
from tests.support.decoders import Decoder, check_greedy, greedy, make_decoder
from tests.support.simulated_engine import SimulatedEngine

_ASKED = 3


class _Late(Recording):
    """What is launched runs when somebody waits for it, or has asked for it some times."""

    def __init__(self, queue: list[Callable[[], object]], bound: Sequence[BoundPlan]) -> None:
        super().__init__(bound)
        self._queue = queue

    def launch(self) -> Launched:
        self._queue.append(super().launch)
        return _LateLaunch(self._queue)


class _LateLaunch(Launched):
    def __init__(self, queue: list[Callable[[], object]]) -> None:
        self._queue, self._last, self._asked = queue, queue[-1], 0

    def __call__(self) -> None:
        _run(self._queue)

    def is_done(self) -> bool:
        self._asked += 1
        while self._asked > _ASKED and self._last in self._queue:
            self._queue.pop(0)()
        return self._last not in self._queue


def _run(queue: list[Callable[[], object]]) -> None:
    while queue:
        queue.pop(0)()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return make_decoder(
        tmp_path_factory.mktemp("late"), "Qwen2", batch=BatchRequest((4,), 32, pages=14, chunks=(16, 64))
    )


@pytest.fixture
def engine(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> PagedEngine:
    device = Device("software-metal")
    queue: list[Callable[[], object]] = []
    beside: Any = copy.copy(device.backend)
    beside.record = lambda bound: _Late(queue, bound)
    for backend in (device.backend, beside):
        monkeypatch.setattr(backend, "shares_memory_with", lambda other: True)
    beside.wait_for = lambda other: None  # that has run
    monkeypatch.setattr(device.backend, "wait_for", lambda other: _run(queue if other is beside else []))
    monkeypatch.setattr(device.backend, "sibling", lambda overlapping=1: beside)
    return PagedEngine(decoder.folder, device)


def _fill(engine: PagedEngine, lane: int, tokens: Sequence[int], pages: Sequence[int], **options: Any) -> Any:
    engine.begin(lane, LaneSampling(), tokens)
    return engine.prefill(Prefill(lane, tokens, 0, pages, **options))


def test_others_go_on_meanwhile(engine: PagedEngine, decoder: Decoder) -> None:
    other = Text(engine, 3, prompt(20, 1), [0]).fill()
    text = Text(engine, 1, prompt(60, 2), [5, 2])
    filling = engine.prefill(*text.parts())
    go_on([other], 3)
    filling()
    text.begin()
    go_on([other, text], 3)
    for each in (other, text):
        check_greedy(decoder, each.prompt, each.tokens)


def test_more_fills_than_turns(engine: PagedEngine, decoder: Decoder) -> None:
    texts = [Text(engine, lane, prompt(40, lane), [2 * lane, 2 * lane + 1]) for lane in range(4)]
    waits = [engine.prefill(*text.parts()) for text in texts for _ in range(2)]
    for wait in reversed(waits):
        assert wait() == ()
    for text in texts:
        assert text.begin().tokens == greedy(decoder, text.prompt, 1)


def test_a_step_behind_a_fill_of_its_lane_waits(engine: PagedEngine, decoder: Decoder) -> None:
    tokens = prompt(40, 5)
    filling = _fill(engine, 2, tokens[:-1], [1, 4])
    stepped = engine.step(one_step(2, tokens[-1:], 39, [1, 4]))
    assert stepped().tokens.tolist() == greedy(decoder, tokens, 1)
    assert filling() == ()


def test_a_copied_page_is_filled_before(engine: PagedEngine, decoder: Decoder) -> None:
    common = prompt(60, 6)
    filling = _fill(engine, 0, common, [3, 4])
    engine.copy_page(3, 10)
    engine.copy_page(4, 11)
    second = Text(engine, 1, common + prompt(3, 7), [10, 11]).fill(start=60)
    go_on([second], 3)
    check_greedy(decoder, second.prompt, second.tokens)
    assert filling.is_done()


def test_texts_of_a_driver(engine: PagedEngine, decoder: Decoder) -> None:
    """Steps go on while prompts are filled in, and none of a text that is still on its way."""
    common, ended = prompt(50, 8), Semaphore(0)
    prompts = prompt(9, 1), prompt(40, 2), [*common, *prompt(15, 3)], [*common, *prompt(5, 4)]
    requests = [TextRequest(tuple(tokens), 12) for tokens in prompts]
    turns: list[Turn] = []

    def deliver(events: Sequence[Event]) -> None:
        for event in events:
            if event.finish:
                ended.release()

    driver = Driver(engine, deliver, observe=lambda turn, seconds: turns.append(turn))
    texts = driver.submit(*requests)
    driver.start()
    for _ in texts:
        assert ended.acquire(timeout=60)
    driver.stop()
    assert [text.finish for text in texts] == ["length"] * 4
    assert texts[3].shared == 50  # a page, and part of one that was copied
    assert sum(bool(turn.steps) and not turn.alone and not turn.fills for turn in turns) > 1
    for text in texts:
        given = list(text.request.prompt)
        check_greedy(decoder, given, text.tokens[len(given) :])


class _Filling:
    def __init__(self, done: bool) -> None:
        self._done = done

    def is_done(self) -> bool:
        return self._done

    def __call__(self) -> tuple[Chosen, ...]:
        return ()


def test_prompts_are_told_in_the_order_in_which_they_were_filled_in() -> None:
    """One that ended while the one before it was asked about waits for that one."""
    driver: Any = Driver(SimulatedEngine(), lambda events: None)
    driver._filling.extend([("first", _Filling(False)), ("second", _Filling(True)), ("third", _Filling(True))])
    assert driver._filled(waits=False) == []
    assert [name for name, _ in driver._filled(waits=True)] == ["first", "second", "third"]
