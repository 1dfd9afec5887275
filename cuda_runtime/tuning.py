"""Tuning: the options of a plan's choices, timed in their places in a run of the whole plan.

A variant of the plan takes the same option in every choice, and its graph notes the time before and after each choice:
what an option finds in the caches, and what it leaves there, is what it would be in a run. Options that are close to
the best are then tried one by one, and stay if the whole run, in which kernels overlap, is quicker. Variants take
turns, so that a clock that changes changes it for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median

from cuda_runtime.backend import CUDABackend
from cuda_runtime.capability import fitting_options
from cuda_runtime.device import CUDABuffer
from cuda_runtime.plan import updated_inputs
from cuda_runtime.tuning_results import choice_digest
from npu_compiler.artifact.plan import Call, CallChoice, ExecutionPlan, KernelCall, KernelSource, Select
from npu_runtime.tuning import OptionTimes, Tuned, Tuning

__all__ = ["Tuner"]

_WARM_UP = 2
_ROUNDS = 15
_WORTHWHILE = 0.999  # of the run's time: what an option must bring it below to be taken
_CLOSE = 1.05  # of the best option's time in its place: within it another is tried in the run

Timer = Callable[[], list[float]]


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
        self._digests = [choice_digest(choice, plan.kernels) for choice in choices]
        self._distinct: dict[str, CallChoice] = {}
        for digest, choice in zip(self._digests, choices, strict=True):
            self._distinct.setdefault(digest, choice)

    def tune(self) -> Tuning:
        """Times all options, and keeps those that make the whole run quicker.

        Raises:
            NPUError: As preparing and running the plan do.
        """
        if not self._distinct:
            return Tuning(())
        seconds = self._option_seconds()
        taken: dict[str, int] = {}
        for digest, option in self._trials(seconds):
            without, with_it = self._whole_seconds([taken, taken | {digest: option}])
            if with_it < _WORTHWHILE * without:
                taken[digest] = option
        before, after = self._whole_seconds([{}, taken])
        if after > before:
            taken = {}
        return Tuning(tuple(self._kept(digest, seconds[digest], taken) for digest in seconds), before, after)

    def _fitting(self, choice: CallChoice) -> list[int]:
        return fitting_options(choice, self._backend.capability)

    def _option_seconds(self) -> dict[str, dict[int, float]]:
        """Of each distinct choice, by option, the mean of the seconds in its places."""
        fitting = {digest: self._fitting(choice) for digest, choice in self._distinct.items()}
        taken = [
            {digest: options[number % len(options)] for digest, options in fitting.items()}
            for number in range(max(map(len, fitting.values())))
        ]
        measured = self._medians([self._variant(options, False) for options in taken])
        seconds: dict[str, dict[int, list[float]]] = {digest: defaultdict(list) for digest in self._distinct}
        for options, spans in zip(taken, measured, strict=True):
            for digest, span in zip(self._digests, spans, strict=True):
                seconds[digest][options[digest]].append(span)
        return {digest: {index: fmean(s) for index, s in options.items()} for digest, options in seconds.items()}

    def _trials(self, seconds: Mapping[str, Mapping[int, float]]) -> Iterator[tuple[str, int]]:
        """What may make the whole run quicker: options other than the preferred that are close to the best in place.

        The run tells more than an option's own time, since a kernel may start before the one ahead of it has finished.
        """
        counts = Counter(self._digests)
        for digest in sorted(seconds, key=lambda digest: -counts[digest] * min(seconds[digest].values())):
            options = seconds[digest]
            preferred = self._fitting(self._distinct[digest])[0]
            for option in sorted(options, key=lambda option: options[option]):
                if option != preferred and options[option] < _CLOSE * min(options.values()):
                    yield digest, option

    def _whole_seconds(self, taken: Sequence[Mapping[str, int]]) -> list[float]:
        """Seconds of a whole run for each assignment of options to choices."""
        return [whole for (whole,) in self._medians([self._variant(options, True) for options in taken])]

    def _kept(self, digest: str, seconds: Mapping[int, float], taken: Mapping[str, int]) -> Tuned:
        choice = self._distinct[digest]
        microseconds = tuple(seconds[i] * 1e6 if i in seconds else None for i in range(len(choice.options)))
        times = OptionTimes(microseconds, taken.get(digest, self._fitting(choice)[0]))
        self._backend.results.keep(digest, times)
        return Tuned(choice.label, self._digests.count(digest), _names(choice, self._plan), times)

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
    copy = buffer.device.allocate(buffer.nbytes)
    copy.copy_from(buffer)
    return copy


def _names(choice: CallChoice, plan: ExecutionPlan) -> tuple[str, ...]:
    return tuple(" + ".join(_name(call, plan) for call in option.calls) for option in choice.options)


def _name(call: Call, plan: ExecutionPlan) -> str:
    if not isinstance(call, KernelCall):
        return f"library {call.routine}"
    kernel = plan.kernels[call.kernel]
    return f"{kernel.entry} ({kernel.digest[:6]}) on {'x'.join(map(str, call.grid))}"
