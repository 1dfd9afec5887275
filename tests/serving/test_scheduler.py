"""Thousands of random texts on a simulated device: no page lost, none shared wrongly, nobody starved."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random

import pytest

from npu_compiler.errors import BusyError, InputError
from npu_text.batching.engine import LaneSampling
from npu_text.batching.pages import PagePool
from npu_text.batching.scheduler import Scheduler
from npu_text.batching.text_guesser import guessing
from npu_text.batching.texts import Limits, Text, TextRequest
from tests.support.simulated_engine import SimulatedEngine, Simulation, alone


def random_request(random: Random, beginnings: Sequence[tuple[int, ...]]) -> TextRequest:
    beginning = random.choice(beginnings)[: random.choice([0, 8, 16, 21, 40, 64])]
    prompt = beginning + tuple(random.choices(range(320), k=random.randint(1, 30)))
    sampling = LaneSampling(temperature=random.choice([0.0, 0.8]), seed=random.randint(0, 9))
    return TextRequest(
        prompt, random.randint(1, 30), sampling, frozenset({7}), random.choice([0, 0, 0, 1]), patience=10_000
    )


@pytest.mark.parametrize(
    ("lanes", "pages", "guess", "late", "ahead"),
    [(4, 24, 1, 2, True), (8, 200, 1, 0, False), (3, 16, 4, 0, True), (16, 64, 1, 3, True)],
)
def test_random_texts_are_those_that_each_is_alone(lanes: int, pages: int, guess: int, late: int, ahead: bool) -> None:
    """The engine reads every text back through its pages; half the texts begin alike, some are cancelled."""
    packed = 0
    random = Random(lanes)
    beginnings = [tuple(random.choices(range(320), k=64)) for _ in range(3)]
    engine = SimulatedEngine(lanes, pages)
    engine.ending, engine.guess, engine.late, engine.packs = 7, guess, late, {8: (2, 4), 32: (2,)}
    simulation = Simulation(engine, ahead=ahead)
    expected: list[list[int]] = []
    texts: list[Text] = []
    pool = simulation.scheduler.pool
    while len(texts) < 400 or simulation.scheduler.waiting or simulation.scheduler.started:
        for _ in range(random.choice([0, 0, 1, 5]) if len(texts) < 400 else 0):
            request = random_request(random, beginnings)
            expected.append(alone(request))
            if guess > 1:
                request = replace(request, guesser=Oracle(expected[-1], random))
            texts.append(simulation.scheduler.submit(request, simulation.now))
        turn, absorb = simulation.launch()
        packed += sum(len(fill.texts) > 1 for fill in turn.fills)
        if texts and random.random() < 0.25:
            simulation.scheduler.cancel(random.choice(texts))
        absorb()
        assert pool.available >= pool.promised
        taken = [text for text in simulation.scheduler.lanes if text is not None]
        assert len(taken) == simulation.scheduler.started
    ends = Counter(text.finish for text in texts)
    assert ends.keys() == {"stop", "length", "cancelled"}
    assert ends["cancelled"] < len(texts) / 2
    for text, truth in zip(texts, expected, strict=True):
        assert text.tokens == truth[: len(text.tokens)]
        assert text.finish == "cancelled" or text.tokens == truth
    counters = simulation.scheduler.counters
    assert counters.shared_tokens > counters.prompt_tokens / 10
    assert packed > 10
    assert guess == 1 or 0 < counters.kept < counters.guessed
    simulation.check_all_free()


@dataclass
class Oracle:
    """Guesses that are right but for one in four."""

    truth: list[int]
    random: Random

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        wanted = self.truth[len(tokens) : len(tokens) + most]
        return [token if self.random.random() < 0.75 else 3 for token in wanted]

    def learn(self, guessed: int, right: int) -> None:
        assert 0 <= right <= guessed


def test_first_come_first_served_within_a_priority() -> None:
    simulation = Simulation(SimulatedEngine(lanes=1, pages=16))
    for priority in (1, 0, 1, 0):
        simulation.scheduler.submit(TextRequest((5, priority), 3, priority=priority), 0)
    simulation.run()
    ended = [event.text for event in simulation.events if event.finish]
    assert [(text.request.priority, text.serial) for text in ended] == [(0, 1), (0, 3), (1, 0), (1, 2)]


def test_a_large_text_is_not_overtaken_by_small_ones() -> None:
    simulation = Simulation(SimulatedEngine(lanes=4, pages=16))
    first = simulation.scheduler.submit(TextRequest(tuple(range(60)), 20), 0)
    large = simulation.scheduler.submit(TextRequest(tuple(range(100, 200)), 28), 0)
    small = [simulation.scheduler.submit(TextRequest((number,), 2), 0) for number in range(20)]
    simulation.turn()
    assert first.lane is not None
    assert large.lane is None
    simulation.run()
    order = [event.text for event in simulation.events if event.finish]
    assert order.index(large) < min(order.index(text) for text in small)


def test_nobody_waits_for_more_than_one_chunk() -> None:
    """While somebody runs, each turn has a step, and prompts of no more than the longest chunk."""
    engine = SimulatedEngine(lanes=8, pages=200)
    simulation = Simulation(engine)
    simulation.scheduler.submit(TextRequest((1, 2), 60), 0)
    simulation.turn()
    for number in range(7):
        simulation.scheduler.submit(TextRequest(tuple(range(number, number + 90)), 5), 0)
    while simulation.scheduler.started:
        turn = simulation.turn()
        assert sum(fill.tokens for fill in turn.fills) <= engine.chunks[-1]
        assert turn.steps or not turn


def test_who_waits_too_long_is_told() -> None:
    simulation = Simulation(SimulatedEngine(lanes=1, pages=16))
    simulation.scheduler.submit(TextRequest((1,), 50), 0)
    late = simulation.scheduler.submit(TextRequest((2,), 5, patience=10), 0)
    while not late.finish:
        turn = simulation.turn()
    assert (late.finish, turn.late, simulation.now) == ("late", [late], 11)
    simulation.run()
    simulation.check_all_free()


def test_queue_is_limited_and_cancelled_texts_leave_it() -> None:
    simulation = Simulation(SimulatedEngine(lanes=1, pages=16), Limits(waiting=3))
    submit = simulation.scheduler.submit
    texts = [submit(TextRequest((1,), 5), 0) for _ in range(3)]
    with pytest.raises(BusyError, match="given 1 more, where 3 texts wait and at most 3 may"):
        submit(TextRequest((1,), 5), 0)
    simulation.scheduler.cancel(texts[0])
    submit(TextRequest((1,), 5), 0)
    for _ in range(1000):  # a flood of texts that leave again
        simulation.scheduler.cancel(texts[1])
        texts[1] = submit(TextRequest((1,), 5, patience=1e9), 0)
    assert len(simulation.scheduler._waiting) < 100
    assert len(simulation.scheduler._deadlines) < 100
    simulation.run()
    simulation.check_all_free()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (TextRequest((), 3), "expected at least 1 and 0"),
        (TextRequest((1,), -1), "expected at least 1 and 0"),
        (TextRequest(tuple(range(100)), 29), "at most 128 in all"),
        (TextRequest((1, 320), 3), "given the token 320"),
        (TextRequest((1,), 120), "there are 8"),
    ],
)
def test_texts_that_can_never_run_are_refused(request_: TextRequest, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Simulation(SimulatedEngine(pages=8)).scheduler.submit(request_, 0)


def test_the_same_prompt_again_is_read_and_its_last_page_copied() -> None:
    simulation = Simulation(SimulatedEngine())
    prompt = tuple(range(32))
    simulation.scheduler.submit(TextRequest(prompt, 4), 0)
    simulation.run()
    simulation.scheduler.submit(TextRequest(prompt, 4), 0)
    turn = simulation.turn()
    ((_, (copy,), (part,), _),) = turn.fills
    assert (part.position, part.tokens) == (30, (30,))
    assert copy[1] == part.pages[-1]
    simulation.run()
    simulation.check_all_free()


def test_texts_that_arrive_together_share_what_the_first_computes() -> None:
    simulation = Simulation(SimulatedEngine())
    for seed in range(4):
        simulation.scheduler.submit(TextRequest(tuple(range(40)), 4, LaneSampling(0.9, seed=seed)), 0)
    simulation.run()
    assert simulation.scheduler.counters.shared_tokens >= 3 * 32
    simulation.check_all_free()


def test_a_page_to_copy_stays_until_it_is_copied() -> None:
    """There is no page to spare: a text that goes on meanwhile may not take the one that is still to be read."""
    simulation = Simulation(SimulatedEngine(pages=14))
    simulation.engine.ending = 7
    submit, beginning = simulation.scheduler.submit, tuple(range(12))
    submit(TextRequest(beginning, 1), 0)
    simulation.run()
    running = submit(TextRequest((50, 51), 63), 0)
    simulation.turn()
    simulation.engine.late = 100
    submit(TextRequest(tuple(range(100, 130)), 3), 0)
    behind = submit(TextRequest((*beginning, 7), 3), 0)
    simulation.run()
    for text in (running, behind):
        assert text.tokens == alone(text.request)
    simulation.check_all_free()


def test_what_is_still_filled_in_is_read_by_none_that_runs() -> None:
    """A text comes to say what the prompt of another has, which is on its way to a page of its own."""
    simulation = Simulation(SimulatedEngine())
    simulation.engine.script, simulation.engine.ending = list(range(50, 90)), 7
    running = simulation.scheduler.submit(TextRequest(tuple(range(8)), 30), 0)
    simulation.turn()
    simulation.turn()
    simulation.engine.late = 100
    other = simulation.scheduler.submit(TextRequest((*range(8), *range(50, 70)), 3), 0)
    simulation.run()
    assert running.tokens == [*range(8), *range(50, 80)]
    assert other.tokens[-4:] == [69, 50, 51, 52]
    simulation.check_all_free()


def test_pages_of_who_is_cancelled_stay_while_they_are_filled_in() -> None:
    simulation = Simulation(SimulatedEngine(pages=10))
    simulation.engine.ending = 7
    submit = simulation.scheduler.submit
    running = submit(TextRequest((50, 51), 40), 0)
    simulation.turn()
    simulation.engine.late = 5
    gone = submit(TextRequest(tuple(range(100, 130)), 3), 0)
    simulation.turn()
    simulation.scheduler.cancel(gone)
    assert simulation.scheduler.started == 2
    follows = submit(TextRequest(tuple(range(200, 230)), 3), 0)
    simulation.engine.late = 0
    simulation.run()
    for text in (running, follows):
        assert text.tokens == alone(text.request)
    simulation.check_all_free()


def test_steps_go_on_while_prompts_are_filled_in() -> None:
    """Two chunks are asked for, the one that is under way and the one that follows."""
    engine = SimulatedEngine(lanes=8, pages=200)
    simulation = Simulation(engine)
    simulation.scheduler.submit(TextRequest((1, 2), 100), 0)
    simulation.turn()
    engine.late = 5
    for number in range(4):
        simulation.scheduler.submit(TextRequest(tuple(range(10 * number, 10 * number + 30)), 1), 0)
    turns = [simulation.turn() for _ in range(25)]
    assert all(turn.steps for turn in turns)
    assert [len(turn.fills) for turn in turns[:12]] == [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert [turn.alone for turn in turns].index(True) == 11


def test_prompts_that_wait_together_go_in_together() -> None:
    """As many as there is a function for, in the order in which they came; what needs a copied page begins a launch."""
    engine = SimulatedEngine(lanes=16, pages=200, page_tokens=8)
    engine.packs, engine.ending = {32: (2, 4)}, 7
    simulation = Simulation(engine)
    submit = simulation.scheduler.submit
    texts = [submit(TextRequest(tuple(range(40 * number, 40 * number + 30)), 3), 0) for number in range(7)]
    submit(TextRequest(tuple(range(100, 105)), 3), 0)  # by another function
    texts.append(submit(TextRequest(tuple(range(20, 50)), 0, scored=1), 0))  # by none of many
    texts.append(submit(TextRequest(tuple(range(30)), 3), 0))  # reads what the first one computed
    turns = [simulation.turn() for _ in range(3)]
    launches = [[[text.serial for text in fill.texts] for fill in turn.fills] for turn in turns]
    assert launches == [[[0, 1, 2, 3]], [[4, 5], [6], [7]], [[8], [9]]]
    assert simulation.scheduler.counters.shared_tokens == 24
    simulation.run()
    for text in texts:
        assert text.request.scored is not None or text.tokens == alone(text.request)
    simulation.check_all_free()


def test_a_prompt_that_is_alone_waits_for_company_behind_others() -> None:
    """Not where nothing is under way, nor where the device has no function for several; and what began goes on."""
    engine = SimulatedEngine(lanes=16, pages=200)
    engine.packs, engine.late = {32: (2,)}, 3
    simulation = Simulation(engine)
    simulation.scheduler.submit(TextRequest((1, 2), 100), 0)  # for steps, beside which all else goes in
    simulation.turn()
    numbers = count(100)

    def launches(*prompts: tuple[int, int]) -> list[list[list[int]]]:
        """Who goes in with whom, turn by turn: of prompts with so many tokens, each followed by so many turns."""
        found = []
        for tokens, turns in prompts:
            simulation.scheduler.submit(TextRequest((next(numbers), *range(tokens - 1)), 9), 0)
            for _ in range(turns):
                found.append([[text.serial for text in fill.texts] for fill in simulation.turn().fills])
        return found

    assert launches((30, 1), (30, 1), (30, 1), (30, 8))[:6] == [[[1]], [], [[2, 3]], [], [], [[4]]]
    assert launches((90, 12))[:4] == [[[5]], [[5]], [], [[5]]]
    assert launches((30, 1), (5, 1)) == [[[6]], [[7]]]
    simulation.run()
    simulation.check_all_free()


def test_scored_prompts_are_computed_whole() -> None:
    simulation = Simulation(SimulatedEngine())
    for _ in range(2):
        text = simulation.scheduler.submit(TextRequest(tuple(range(40)), 0, scored=1), 0)
        simulation.run()
        assert text.finish == "length"
        scores = [score for event in simulation.events if event.text is text for score in event.scores]
        assert scores[0] is None
        assert [score.token for score in scores[1:] if score] == list(range(1, 40))
    simulation.check_all_free()


def test_a_failed_device_ends_everything() -> None:
    simulation = Simulation(SimulatedEngine(lanes=2))
    texts = [simulation.scheduler.submit(TextRequest(tuple(range(40)), 20), 0) for _ in range(5)]
    simulation.turn()
    assert set(simulation.scheduler.end_all()) == set(texts)
    simulation.check_all_free()


def test_pages_are_drawn_when_they_are_written_to() -> None:
    simulation = Simulation(SimulatedEngine(page_tokens=8))
    text = simulation.scheduler.submit(TextRequest(tuple(range(5)), 20), 0)
    simulation.turn()
    for length in range(5, 12):
        assert len(text.tokens) == length
        _, absorb = simulation.launch()
        assert text.table is not None
        assert len(text.table.pages) == 1 + (length > 8)  # the last token is at position length - 1
        absorb()
    simulation.run()
    simulation.check_all_free()


def test_steps_are_asked_for_before_the_last_one_is_known() -> None:
    """A text that has all its tokens takes part in no more steps; one that ends unexpectedly does in one."""
    simulation = Simulation(SimulatedEngine(), ahead=True)
    simulation.engine.ending = 7
    submit = simulation.scheduler.submit
    long, short = (submit(TextRequest((number,), limit), 0) for number, limit in ((1, 40), (2, 2)))
    simulation.turn()
    simulation.turn()
    turns = [simulation.launch()[0] for _ in range(3)]
    assert [list(turn.running) for turn in turns] == [[long, short], [long, short], [long]]
    sources = [None if turn.steps is None else turn.steps.sources for turn in turns]
    assert [None if each is None else each.tolist() for each in sources] == [None, [0, 1], [0]]
    assert [turn.full for turn in turns] == [[], [1], []]
    assert len(long.tokens) == len(short.tokens) == 1


def test_a_page_is_shared_when_the_step_has_run_that_fills_it() -> None:
    """What is filled in overtakes steps, so that it would read the page before its last token is there."""
    truth = alone(TextRequest((1, 2, 3, 4, 5), 20))
    for length in range(6, 11):
        simulation = Simulation(SimulatedEngine(page_tokens=8), ahead=True)
        simulation.engine.ending = 7
        simulation.scheduler.submit(TextRequest((1, 2, 3, 4, 5), 20), 0)
        for _ in range(length - 3):
            simulation.turn()
        follower = simulation.scheduler.submit(TextRequest((*truth[:9], 0), 4), 0)
        simulation.run()
        assert follower.finish
        simulation.check_all_free()


def test_steps_that_depend_on_tokens_are_not_asked_for_before_they_are_known() -> None:
    simulation = Simulation(SimulatedEngine(), ahead=True)
    plain = simulation.scheduler.submit(TextRequest((1,), 9), 0)
    simulation.turn()
    simulation.turn()
    assert simulation.scheduler.is_ahead
    simulation.scheduler.submit(TextRequest((2,), 3, LaneSampling(frequency_penalty=0.5)), 0)
    known = 0
    while not plain.finish:
        steps = simulation.turn().steps
        if steps is not None and len(steps.lanes) == 2:
            assert steps.sources is None
            known += 1
    assert known == 3
    simulation.run()
    simulation.check_all_free()


def test_a_text_that_is_cancelled_while_a_step_runs_gets_no_more() -> None:
    simulation = Simulation(SimulatedEngine(page_tokens=8))
    texts = [simulation.scheduler.submit(TextRequest((number,) * 8, 20), 0) for number in range(3)]
    for _ in range(7):
        simulation.turn()
    _, absorb = simulation.launch()
    simulation.scheduler.cancel(texts[1])
    before = len(texts[1].tokens)
    simulation.events.clear()
    absorb()
    assert len(texts[1].tokens) == before
    assert [event.text for event in simulation.events] == [texts[0], texts[2]]
    simulation.scheduler.cancel(texts[0])  # between two turns
    turn = simulation.turn()
    assert list(turn.running) == [texts[2]]
    simulation.run()
    simulation.check_all_free()


def _calls(run: Callable[[], object]) -> int:
    """How many functions of Python are called."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_a_step_takes_no_more_calls_for_more_texts() -> None:
    """Between two launches nothing is done text by text but a look at each token."""
    counts = []
    for lanes in (2, 16):
        engine = SimulatedEngine(lanes=lanes, pages=lanes, page_tokens=128)
        scheduler = Scheduler(engine)
        for number in range(lanes):
            scheduler.submit(TextRequest((number,), 60), 0)
        for _ in range(3 * lanes):
            turn = scheduler.next_turn(0)
            for begin in turn.begins:
                engine.begin(*begin)
            filled = [(fill, engine.prefill(*fill.parts)()) for fill in turn.fills]
            stepped = engine.step(turn.steps)() if turn.steps else None
            scheduler.absorb(turn, filled, stepped)
        turn = scheduler.next_turn(0)
        assert turn.steps is not None
        stepped = engine.step(turn.steps)()
        count = _calls(partial(scheduler.absorb, turn, (), stepped))
        counts.append(count + _calls(partial(scheduler.next_turn, 0)))
    assert counts[0] == counts[1] < 50


def test_least_recently_used_pages_go_first() -> None:
    pool = PagePool(4, 2)

    def use(*tokens: int) -> int:
        table = pool.admit([*tokens, 99], len(tokens))
        assert table is not None
        table.begin([*tokens, 99])
        shared = table.shared_tokens
        table.room(len(tokens))
        table.release(tokens)
        return shared

    assert use(1, 2, 3, 4) == 0
    assert use(5, 6) == 0
    assert use(1, 2) == 2  # used again; 3, 4 is the oldest now
    assert use(7, 8, 9, 10) == 0  # takes the free page, and that of 3, 4
    assert use(1, 2) == 2
    assert use(5, 6) == 2


def test_texts_that_repeat_themselves_take_fewer_steps() -> None:
    """The guesses of `text_guesser`, which change no text."""
    said = [5, 6, 7, 8, 9] * 20
    calls = []
    for guess in (1, 4):
        engine = SimulatedEngine(lanes=1)
        engine.script, engine.ending, engine.guess = said, 0, guess
        simulation = Simulation(engine)
        make, _ = guessing(engine)
        request = TextRequest((1, 2), len(said), guesser=make() if make else None)
        text = simulation.scheduler.submit(request, 0)
        simulation.run()
        assert text.tokens[2:] == said
        calls.append(engine.calls[1])
    assert calls[1] < calls[0] / 2
