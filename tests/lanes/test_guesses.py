"""Guesses of what repeats: found, kept where they pay, and never a change of the text."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_runtime import Device, NPUBuffer
from npu_text.batching.choosing import LaneChooser, LaneRow, accepted
from npu_text.batching.engine import LaneSampling
from npu_text.batching.guesses import GuessControl, RepeatedText, StepTimes

VOCABULARY = 24
LENGTHS = (4, 8)


def looked_up(tokens: list[int], count: int) -> list[int]:
    """What followed the latest earlier place of the longest run at the end, of 2 to 6 tokens."""
    for length in range(6, 1, -1):
        run = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(run) == length and tokens[end - length : end] == run:
                return [tokens[end + number % (len(tokens) - end)] for number in range(count)]
    return []


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_a_guess_is_what_followed_the_longest_run(tokens: list[int], count: int) -> None:
    text = RepeatedText(tokens[: len(tokens) // 2])
    text.extend(tokens[len(tokens) // 2 :])
    assert text.tokens == tokens
    assert text.guess(count) == looked_up(tokens, count)


def test_what_repeats_itself_goes_on() -> None:
    assert RepeatedText([1, 2, 3, 1, 2, 3, 1, 2]).guess(5) == [3, 1, 2, 3, 1]
    assert RepeatedText([7, 7, 7]).guess(3) == [7, 7, 7]
    assert RepeatedText([1, 2, 3]).guess(3) == []
    assert RepeatedText().guess(2) == []


def run_control(control: GuessControl, truth: float, steps: int, rng: np.random.Generator) -> list[int]:
    """The lengths that a control asks for, where each guessed token is right with a probability."""
    taken = []
    for _ in range(steps):
        taken.append(control.length())
        if taken[-1] > 1:
            right = int((rng.random(taken[-1] - 1) < truth).cumprod().sum())
            control.learn(taken[-1] - 1, right)
    return taken


def test_guesses_that_pay_stay(rng: np.random.Generator) -> None:
    taken = run_control(GuessControl(StepTimes({1: 1.0, 4: 1.1, 8: 1.2}), LENGTHS), 0.95, 200, rng)
    assert taken.count(8) > 150


def test_guesses_that_do_not_pay_are_tried_ever_less(rng: np.random.Generator) -> None:
    control = GuessControl(StepTimes({1: 1.0, 4: 1.4, 8: 1.6}), LENGTHS)
    taken = run_control(control, 0.0, 4000, rng)
    assert sum(length > 1 for length in taken[:400]) < 60
    assert sum(length > 1 for length in taken[-2000:]) < 100
    later = run_control(control, 1.0, 600, rng)
    assert later[-1] == 8, "it is noticed when they begin to be right"


def test_steps_that_take_too_long_are_not_taken(rng: np.random.Generator) -> None:
    control = GuessControl(StepTimes({1: 1.0, 4: 5.0, 8: 9.0}), LENGTHS)
    assert {*run_control(control, 1.0, 100, rng)} == {1}
    assert GuessControl(StepTimes({1: 1.0}), ()).length() == 1


def test_times_are_learned() -> None:
    times = StepTimes()
    assert times.ratio(4) is None
    assert GuessControl(times, LENGTHS).length() == 4, "to be measured"
    times.learn(1, 1.0)
    times.learn(8, 2.0)
    assert times.ratio(4) == times.ratio(8) == 2.0
    assert times.ratio(9) is None
    for _ in range(100):
        times.learn(8, 4.0)
    assert times.ratio(8) == pytest.approx(4.0, rel=1e-3)


def model(text: list[int]) -> NDArray[np.float32]:
    """Logits that depend on all tokens before, and lean towards what the text had."""
    rng = np.random.default_rng(zlib.crc32(bytes(text)))
    logits = rng.standard_normal(VOCABULARY).astype(np.float32)
    guess = RepeatedText(text).guess(1)
    logits[guess] += 7
    return logits


@pytest.mark.parametrize("sampling", [LaneSampling(), LaneSampling(0.8, top_p=0.9, seed=3)], ids=str)
def test_guesses_do_not_change_the_text(sampling: LaneSampling, device: Device) -> None:
    """Greedy and drawn: a text of steps for several tokens is that of steps for one, and takes fewer."""
    texts, steps = [], []
    for most in (1, 6):
        chooser = LaneChooser(device, VOCABULARY, "bfloat16", 1)
        buffer = NPUBuffer.zeros((most, 1, VOCABULARY), dtype="bfloat16", device=device)
        text, number = RepeatedText([1, 2, 3, 1, 2]), 0
        chooser.begin(0, sampling, text.tokens)
        while len(text.tokens) < 90:
            tokens = [text.tokens[-1], *text.guess(most - 1)]
            rows = [LaneRow(0, len(text.tokens) + place) for place in range(len(tokens))]
            logits = [model(text.tokens + tokens[1 : place + 1]) for place in range(len(tokens))]
            with buffer.data.writing() as content:
                filled = np.zeros((most, 1, VOCABULARY), ml_dtypes.bfloat16)
                filled[: len(logits), 0] = np.array(logits)
                buffer.spec.encode_into(filled, content)
            chosen = [one.token for one in chooser.choose(buffer, rows)()]
            text.extend(chosen[: accepted(tokens, chosen)])
            number += 1
        texts.append(text.tokens[:90])
        steps.append(number)
    assert texts[0] == texts[1]
    assert steps[1] < 0.8 * steps[0]
