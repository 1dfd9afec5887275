"""Tuning: the options of a plan's choices, timed in their places in a run of the whole plan.

A variant of the plan takes the same option in every choice, and its graph notes the time before and after each choice:
what an option finds in the caches, and what it leaves there, is what it would be in a run. Variants take turns, so that
a clock that changes changes it for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from cuda_runtime.capability import fitting_options
from cuda_runtime.plan import updated_inputs
from cuda_runtime.tuning_results import OptionTimes, choice_digest
from npu_compiler.codegen.plan import Call, CallChoice, ExecutionPlan, KernelCall, KernelSource, Select

if TYPE_CHECKING:
    from cuda_runtime.backend import CUDABackend, CUDABuffer

__all__ = ["Tuned", "Tuner", "Tuning"]

_WARM_UP = 2
_ROUNDS = 15
_WORTHWHILE = 0.98  # of the preferred option's time: what another must stay below to be taken

Timer = Callable[[], list[float]]


@dataclass(frozen=True)
class Tuned:
    """A distinct choice between options that the device can run, and what was found.

    Attributes:
        label: What it computes, where the plan first makes it.
        count: How often the plan makes it.
        options: What each option launches, for people.
        times: How long each option takes.
    """

    label: str
    count: int
    options: tuple[str, ...]
    times: OptionTimes


@dataclass(frozen=True)
class Tuning:
    """What tuning a plan found.

    Attributes:
        choices: The distinct choices.
        before, after: Seconds of a whole run on the device, with the preferred options and with the winners; both are
            zero where there is no choice.
    """

    choices: tuple[Tuned, ...]
    before: float = 0.0
    after: float = 0.0


class Tuner:
    """Tunes one plan on one device."""

    def __init__(self, plan: ExecutionPlan, backend: CUDABackend, buffers: Sequence[CUDABuffer]) -> None:
        """Args:
        plan: A plan with its choices.
        backend: The device; its `results` keep the winners.
        buffers: The memory of each of `ExecutionPlan.buffers`, filled as for a run. What the plan updates in place is
            left as it was.
        """
        self._plan, self._backend, self._buffers = plan, backend, buffers
        self._saved = [(buffers[index], _copy_of(buffers[index])) for index in updated_inputs(plan)]
        choices = [step for step in plan.steps if isinstance(step, CallChoice) and len(self._fitting(step)) > 1]
        self._choices = [(choice, choice_digest(choice, plan.kernels)) for choice in choices]

    def tune(self) -> Tuning:
        """Times all options and keeps the winners, or the preferred ones where the winners together are slower.

        Raises:
            NPUError: As preparing and running the plan do.
        """
        if not self._choices:
            return Tuning(())
        first = {digest: choice for choice, digest in reversed(self._choices)}
        times = {digest: self._judged(first[digest], seconds) for digest, seconds in self._option_seconds().items()}
        before, after = self._whole_seconds([{}, {digest: found.winner for digest, found in times.items()}])
        if after > before:
            times = {digest: replace(found, winner=self._fitting(first[digest])[0]) for digest, found in times.items()}
        for digest, found in times.items():
            self._backend.results.keep(digest, found)
        counts = Counter(digest for _, digest in self._choices)
        tuned = [Tuned(first[d].label, counts[d], _names(first[d], self._plan), times[d]) for d in times]
        return Tuning(tuple(tuned), before, after)

    def _fitting(self, choice: CallChoice) -> list[int]:
        return fitting_options(choice, self._backend.capability)

    def _option_seconds(self) -> dict[str, dict[int, list[float]]]:
        """Of each distinct choice, by option, the seconds in each of its places."""
        variants = max(len(self._fitting(choice)) for choice, _ in self._choices)
        taken = [
            {d: self._fitting(c)[number % len(self._fitting(c))] for c, d in self._choices}
            for number in range(variants)
        ]
        measured = self._medians([self._variant(options, False) for options in taken])
        seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for options, spans in zip(taken, measured, strict=True):
            for (_, digest), span in zip(self._choices, spans, strict=True):
                seconds[digest][options[digest]].append(span)
        return seconds

    def _whole_seconds(self, taken: Sequence[Mapping[str, int]]) -> list[float]:
        """Seconds of a whole run for each assignment of options to choices."""
        return [whole for (whole,) in self._medians([self._variant(options, True) for options in taken])]

    def _judged(self, choice: CallChoice, seconds: Mapping[int, Sequence[float]]) -> OptionTimes:
        means = {option: fmean(samples) for option, samples in seconds.items()}
        preferred, best = self._fitting(choice)[0], min(means, key=lambda option: means[option])
        winner = best if means[best] < _WORTHWHILE * means[preferred] else preferred
        times = tuple(means[index] * 1e6 if index in means else None for index in range(len(choice.options)))
        return OptionTimes(times, winner)

    def _variant(self, options: Mapping[str, int], whole: bool) -> Timer:
        """A timer, of the whole run or of each choice, that takes the given options and else the preferred ones."""

        def select(choice: CallChoice, kernels: Sequence[KernelSource]) -> int:
            return options.get(choice_digest(choice, kernels), self._fitting(choice)[0])

        resolved = self._plan.resolved(select)
        spans = [range(len(resolved.calls))] if whole else self._spans(select)
        return self._backend.prepare(resolved).timer(self._buffers, spans)

    def _spans(self, select: Select) -> list[range]:
        """Where the calls of each choice are among those of the resolved plan."""
        spans, end = [], 0
        for step in self._plan.steps:
            if not isinstance(step, CallChoice):
                end += 1
                continue
            start, end = end, end + len(step.options[select(step, self._plan.kernels)].calls)
            if len(self._fitting(step)) > 1:
                spans.append(range(start, end))
        return spans

    def _medians(self, timers: Sequence[Timer]) -> list[list[float]]:
        """Runs the timers in turns: for each of them the median of each of its spans, in seconds."""
        samples: list[list[list[float]]] = [[] for _ in timers]
        for number in range(_WARM_UP + _ROUNDS):
            for timer, taken in zip(timers, samples, strict=True):
                seconds = timer()
                for buffer, copy in self._saved:
                    buffer.copy_from(copy)
                if number >= _WARM_UP:
                    taken.append(seconds)
        return [[median(span) for span in zip(*taken, strict=True)] for taken in samples]


def _copy_of(buffer: CUDABuffer) -> CUDABuffer:
    copy = buffer.backend.allocate(buffer.nbytes)
    copy.copy_from(buffer)
    return copy


def _names(choice: CallChoice, plan: ExecutionPlan) -> tuple[str, ...]:
    return tuple(" + ".join(_name(call, plan) for call in option.calls) for option in choice.options)


def _name(call: Call, plan: ExecutionPlan) -> str:
    if not isinstance(call, KernelCall):
        return f"library {call.routine}"
    kernel = plan.kernels[call.kernel]
    return f"{kernel.entry} ({kernel.digest[:6]}) on {'x'.join(map(str, call.grid))}"
