"""Calls of the functions of a batch: inputs that the host writes, launches, and results that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.batch_spec import BatchStepSpec
from npu_compiler.compiler import compile
from npu_compiler.errors import NPUError
from npu_compiler.graph.lane_tokens import Feature
from npu_compiler.graph.page_copies import staging_ir
from npu_runtime.backend import BoundPlan, DeviceBuffer, Launched, Recording
from npu_runtime.buffer import NPUBuffer
from npu_runtime.executor import Executor
from npu_runtime.weight_loader import Weights
from npu_text.batching.bound_choice import BoundChoice, LaneGroup
from npu_text.batching.choosing import LaneChooser
from npu_text.batching.engine import Chosen, LaneSteps, MaskSource, Prefill, Stepped
from npu_text.batching.scoring import BoundScores, TokenScorer
from npu_text.step_functions import device_buffer, visible

__all__ = ["TURNS", "LogitReaders", "Scene", "StepCalls", "StepResult", "StepTurn"]

_Given = TypeVar("_Given")
TURNS = 2  # steps that may be on their way at a time: one goes on from what the one before chooses
_TURNS_BESIDE = 4  # of one that overlaps with others: several may be queued while steps go on
_NOBODY = -1  # the position of what is nobody's
_KNOWN = -1  # the source of a token that the host gives
_TOKEN_BYTES = 8


class LogitReaders(NamedTuple):
    """What reads the logits of functions.

    Attributes:
        chooser: Chooses tokens.
        scorer: Scores those of prompts.
        chosen: Visible memory for the tokens that steps choose, by their turns' numbers; none where no step follows.
    """

    chooser: LaneChooser
    scorer: TokenScorer
    chosen: Sequence[DeviceBuffer] = ()


class Scene:
    """What the turns of a function share: memory on the device, and the plans around it.

    Where the function runs on a sibling of the chooser's device it overlaps with what that does. Neither waits for the
    other: a step never reads nor writes what is being filled in, and the other way round.

    Attributes:
        device: Where the function runs.
        overlaps: Whether that is a sibling.
        step: The function.
        idle: The page that nobody reads.
        follows: Whether a call may take tokens that the turn before chooses, one of those with the other number.
        around: Of the inputs that host and device see.
    """

    def __init__(
        self,
        step: BatchStepSpec,
        executor: Executor,
        pools: Sequence[NPUBuffer],
        weights: Weights,
        readers: LogitReaders,
        idle: int,
    ) -> None:
        device = self.device = executor.device
        self._chooser, self._scorer, self._chosen = readers
        self.overlaps = device.backend is not self._chooser.device.backend
        self.step, self.idle = step, idle
        specs = {spec.name: spec for spec in executor.plan.inputs}
        self._names = [name for name in (step.tokens, step.positions, step.tables, step.last) if name]
        self.staged = [specs[name] for name in self._names]
        self.follows = bool(self._chosen) and self.staged[0].shape[1] == 1
        given = [(f"input_{i}", spec.shape, str(spec.host_dtype)) for i, spec in enumerate(self.staged)]
        ir = staging_ir(given, self._chosen[0].nbytes // _TOKEN_BYTES if self.follows else 0)
        self._staging = Executor(compile(ir, device.target, self._chooser.kind), device)
        self.around = {spec.name: spec for spec in self._staging.plan.inputs}
        self._there = [device_buffer(device, spec) for spec in self.staged]
        self._inputs = dict(zip(self._names, self._there, strict=True))
        self._inputs |= {name: pool for (name, _), pool in zip(step.pools, pools, strict=True)}
        self._executor, self._weights = executor, weights
        given_out = [spec for spec in executor.plan.outputs if spec.name == step.logits]
        self._outputs = {spec.name: device_buffer(device, spec) for spec in given_out}
        self._function = executor.bind(self._inputs, self._outputs, weights)

    def record(self, inputs: Mapping[str, NPUBuffer], features: frozenset[Feature] | None, number: int) -> _Call:
        """A call of the function, from staged inputs to the chosen tokens; without a choice where features are None.

        Where there are masks, the choice is asked for by itself.
        """
        tokens = self._chosen[number] if self._chosen else None
        choice = None if features is None else self._chooser.bind(self._outputs[self.step.logits], features, tokens)
        if choice is None or features is None:
            return _Call(self._recorded(inputs), None, None)
        if Feature.MASK in features:
            return _Call(self._recorded(inputs), choice, self.device.backend.record(choice.plans))
        return _Call(self._recorded(inputs, choice.plans), choice, None)

    def record_scores(self, inputs: Mapping[str, NPUBuffer]) -> _ScoringCall:
        """A call of the function, from staged inputs to scores."""
        scores = self._scorer.bind(self._outputs[self.step.logits])
        return _ScoringCall(self._recorded(inputs, [scores.plan]), scores)

    def _recorded(self, inputs: Mapping[str, NPUBuffer], behind: Sequence[BoundPlan] = ()) -> Recording:
        there = {f"input_{i}_there": buffer for i, buffer in enumerate(self._there)}
        return self.device.backend.record([self._staging.bind(inputs, there), self._function, *behind])

    def visible_inputs(self, number: int) -> tuple[list[NDArray[Any]], NDArray[np.int64] | None, dict[str, NPUBuffer]]:
        """What a turn with this number gives to the function: as the host sees it, with `LaneSteps.sources` by itself
        where steps may follow each other unseen, and as the device does."""
        buffers: dict[str, NPUBuffer] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for name, spec in self.around.items():
            if name == "chosen":  # by the turn before
                buffers[name] = NPUBuffer(self.device, self._chosen[1 - number], spec)
            else:
                arrays[name], buffers[name] = visible(self.device, spec)
        sources = arrays.pop("sources", None)
        return [arrays[f"input_{i}"] for i in range(len(self.staged))], sources, buffers


class _Call(NamedTuple):
    """A function and the choice behind it, ready to launch; `by_itself` is the choice where it is another launch."""

    recording: Recording
    choice: BoundChoice | None
    by_itself: Recording | None


class _ScoringCall(NamedTuple):
    """A function and the scores behind it, ready to launch."""

    recording: Recording
    scores: BoundScores


class StepCalls:
    """Calls of one function, each in one of some turns."""

    def __init__(self, scene: Scene) -> None:
        self._turns = [StepTurn(scene, number) for number in range(_TURNS_BESIDE if scene.overlaps else TURNS)]

    def numbered(self, number: int) -> StepTurn:
        """The turn with a number, once its call has run."""
        self._turns[number].free()
        return self._turns[number]

    def turn(self) -> StepTurn:
        """A turn: the latest that is free, as each is recorded by itself; else the oldest, once its call has run."""
        found = next((turn for turn in reversed(self._turns) if turn.is_free), self._turns[0])
        self._turns.remove(found)
        self._turns.append(found)
        found.free()
        return found


class StepTurn:
    """One call of a function: its inputs, in memory that host and device see; what they hold at a launch counts."""

    def __init__(self, scene: Scene, number: int) -> None:
        self._scene, self._number = scene, number
        (self._tokens, self.positions, self._tables, *last), self._sources, self._buffers = scene.visible_inputs(number)
        self._last = last[0] if last else None
        self._used = 0  # lanes of the last call
        self._tables[...] = scene.idle
        self._tokens[...] = 0
        if self._sources is not None:
            self._sources[...] = _KNOWN
        self.positions[...] = _NOBODY
        self._calls: dict[frozenset[Feature] | None, _Call] = {}
        self._scoring: _ScoringCall | None = None
        self._pending: StepResult[Any] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing of its last call is left to be waited for."""
        return self._pending is None or self._pending.is_settled

    def free(self) -> None:
        """Waits for the last call; what it gave is kept for whoever asks for it."""
        if self._pending is not None:
            self._pending.settle()
            self._pending = None

    def put_parts(self, parts: Sequence[Prefill]) -> None:
        """Gives the tokens of prompts, for the function that fills a cache; other rows are nobody's."""
        self.positions[...], self._tables[...] = _NOBODY, self._scene.idle
        for lane, part in enumerate(parts):
            count = len(part.tokens)
            self._tokens[lane, :count], self._tokens[lane, count:] = part.tokens, 0
            self.positions[lane, :count] = np.arange(part.position, part.position + count)
            self._tables[lane, : len(part.pages)] = part.pages
        if self._last is not None:
            self._last[0] = 0

    def put(self, steps: LaneSteps, tables: NDArray[np.int32]) -> None:
        """Gives the tokens of lanes, and their rows of the tables of all lanes; other rows are nobody's."""
        count = len(steps.lanes)
        self._tokens[:count, 0], self.positions[:count, 0] = steps.tokens, steps.positions
        if self._sources is not None:
            self._sources[:count] = _KNOWN if steps.sources is None else steps.sources
        np.take(tables, steps.lanes, 0, out=self._tables[:count], mode="clip")
        if count < self._used:
            self.positions[count : self._used] = _NOBODY
            self._tables[count : self._used] = self._scene.idle
        self._used = count
        if self._tokens.shape[1] > 1:
            self.positions[:count, 1:] = _NOBODY
            for row, guess in enumerate(steps.guesses):
                end = 1 + len(guess)
                self._tokens[row, 1:end] = guess
                self.positions[row, 1:end] = np.arange(1, end) + steps.positions[row]

    def launch(
        self, group: LaneGroup | None, positions: NDArray[np.int64], masks: Sequence[tuple[MaskSource, int]]
    ) -> StepResult[Stepped]:
        """Asks for the call, and for choices from the first rows of its logits.

        Args:
            group: For whom to choose; None for no choice.
            positions: int64 [R], of the chosen tokens.
            masks: Who tells which tokens may be chosen, each with its row; they are asked while the call runs.

        Returns:
            What waits for the choices.
        """
        features = None if group is None else group.features(bool(masks))
        call = self._calls.get(features)
        if call is None:
            call = self._calls[features] = self._scene.record(self._buffers, features, self._number)
        if group is not None and call.choice is not None:
            call.choice.put(group, positions)
        waits = [call.recording.launch()]
        if call.choice is not None and call.by_itself is not None:
            with call.choice.masks() as content:
                masks[0][0].write_masks(masks, content)
            waits.append(call.by_itself.launch())
        result = StepResult(waits, _nothing if call.choice is None else partial(_stepped, call.choice))
        self._pending = result
        return result

    def score(self, tokens: Sequence[int], best: int) -> StepResult[tuple[Chosen, ...]]:
        """Asks for the call, and for scores of tokens by the first rows of its logits; gives what waits for them."""
        if self._scoring is None:
            self._scoring = self._scene.record_scores(self._buffers)
        self._scoring.scores.put(tokens, best)
        result = StepResult([self._scoring.recording.launch()], self._scoring.scores.read)
        self._pending = result
        return result


def _nothing() -> Stepped:
    return Stepped(np.empty(0, np.int64))


def _stepped(choice: BoundChoice) -> Stepped:
    tokens, told = choice.read()
    return Stepped(tokens, told={place: (one,) for place, one in told.items()})


class StepResult(Generic[_Given]):
    """What a call gives, once it has been waited for."""

    def __init__(self, waits: Sequence[Launched], read: Callable[[], _Given]) -> None:
        """For a call.

        Args:
            waits: What waits for its launches, in order.
            read: Reads the results then.
        """
        self._waits, self._read = waits, read
        self._given: list[_Given] = []
        self._error: NPUError | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it has been waited for."""
        return not self._waits

    def settle(self) -> None:
        """Waits; an error is kept for `__call__`."""
        if self.is_settled:
            return
        waits, self._waits = self._waits, ()
        try:
            for wait in reversed(waits):  # the last one tells when all have run
                wait()
            self._given.append(self._read())
        except NPUError as error:
            self._error = error

    def is_done(self) -> bool:
        """Whether all has run."""
        return self.is_settled or self._waits[-1].is_done()

    def __call__(self) -> _Given:
        """The results.

        Raises:
            InputError: A table names a page that there is none of.
            DeviceError: The device failed, or logits are no numbers.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        return self._given[0]
