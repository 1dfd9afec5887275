"""An engine of a batch whose keys and values lie in pages: a step is one launch on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.batch_spec import BatchSpec, BatchStepSpec
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile
from npu_compiler.errors import InputError, NPUError
from npu_compiler.graph.lane_tokens import Feature
from npu_compiler.graph.page_copies import page_read_ir, page_write_ir, staging_ir
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.backend import BoundPlan, Recording
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.weight_loader import Weights
from npu_text.batching.choosing import BoundChoice, LaneChooser, LaneRow, accepted
from npu_text.batching.engine import Chosen, LaneSampling, LaneStep, Prefill, Prefilled
from npu_text.batching.lane_sampling import check_sampling
from npu_text.batching.scoring import BoundScores, TokenScorer
from npu_text.step_functions import ProgramFunctions, open_program

__all__ = ["PagedEngine"]

_TURNS = 2  # calls of a function that may be on their way at a time
_NOBODY = -1  # the position of what is nobody's


class PagedEngine:
    """A `BatchEngine` on one device.

    A page's number is that of its place in each pool; behind the last one the pools have a page that nobody reads, for
    lanes and tokens that are nobody's.

    Attributes:
        spec: What the functions take and give.
        device: Where they run.
        chooser: What chooses tokens.
        scorer: What scores those of prompts.
        lanes, page_tokens, pages, context, vocabulary, chunks, guess: As `BatchEngine` says.
    """

    def __init__(self, folder: Path, device: Device, program: CompiledProgram | None = None) -> None:
        """Compiles the functions where that was not done yet, loads the weights once for all of them, makes the pools.

        Args:
            folder: What ``npu extract-llm --lanes`` made.
            device: Where to run.
            program: The folder's functions for many texts, already compiled.

        Raises:
            InputError: The folder has no functions for many texts.
            NPUError: It is incomplete or damaged, or the device cannot hold or run the model.
        """
        spec = GenerationSpec.load(folder)
        if spec.batch is None:
            raise InputError(
                f"given '{folder}', which has functions for one text alone; extract it with: npu extract-llm --lanes"
            )
        self.spec, self.device, batch = spec, device, spec.batch
        self._decode, self._check, self._chunk = batch.decode, batch.check, batch.chunks
        self.lanes, self.page_tokens, self.pages = max(self._decode), batch.page_tokens, batch.pages
        self.context, self.vocabulary, self.chunks = batch.context, spec.vocabulary, tuple(self._chunk)
        self.guess = batch.guess
        self.chooser = LaneChooser(device, spec.vocabulary, spec.dtype, self.lanes)
        self.scorer = TokenScorer(device, spec.dtype)
        irs = {name: step.ir for name, step in batch.functions.items()}
        program = program or open_program(folder, irs, device.target, "batch")
        functions = ProgramFunctions(program, folder / spec.weights, device)
        executors = {name: functions.executor(name) for name in batch.functions}  # all of them, ahead of any recording
        pools = _pools(batch, executors[next(iter(executors))], device)
        self._functions = {
            name: _Function(_Scene(self, batch.functions[name], executor, pools, functions.weights))
            for name, executor in executors.items()
        }
        self._copy = _PageCopy(self, pools)

    def check(self, sampling: LaneSampling, scored: int | None, masked: bool) -> None:
        """As `BatchEngine.check`."""
        check_sampling(sampling, self.vocabulary)
        check_sampling(LaneSampling(best=scored), self.vocabulary)

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None:
        """As `BatchEngine.begin`."""
        self.chooser.begin(lane, sampling, tokens)

    def prefill(self, part: Prefill) -> Callable[[], Prefilled]:
        """As `BatchEngine.prefill`."""
        count = len(part.tokens)
        length = next((n for n in self.chunks if n >= count), 0)
        if not count or not length:
            raise InputError(f"given {count} tokens of lane {part.lane}, expected 1 to {self.chunks[-1]}")
        if part.scored is not None:
            return self._scored(part, part.scored)
        turn = self._functions[self._chunk[length]].turn()
        turn.put(0, part.tokens, part.position, part.pages)
        turn.set_last(count - 1)
        rows = [LaneRow(part.lane, part.position + count, part.mask)] if part.choose else []
        wait = turn.launch(rows)
        return lambda: Prefilled(next(iter(wait()), None))

    def _scored(self, part: Prefill, best: int) -> Callable[[], Prefilled]:
        """Tokens of one text as the lanes of decode steps, for chunks give the logits of their last token alone.

        All lanes of a step write their keys before any reads, so each token sees those before it.
        """
        steps = [
            LaneStep(part.lane, (token,), position, part.pages, part.mask)
            for position, token in enumerate(part.tokens, part.position)
        ]
        plain = steps[:-1] if part.choose else steps
        following = [*part.tokens[1:], *([] if part.following is None else [part.following])]
        waits = []
        for start in range(0, len(plain), self.lanes):
            some = plain[start : start + self.lanes]
            turn = self._functions[next(name for lanes, name in self._decode.items() if lanes >= len(some))].turn()
            turn.put_all(some)
            waits.append(turn.score(following[start : start + len(some)], best))
        chosen = self.step(steps[-1:]) if part.choose else lambda: ((None,),)
        return lambda: Prefilled(chosen()[0][0], tuple(score for wait in waits for score in wait()))

    def step(self, steps: Sequence[LaneStep]) -> Callable[[], Sequence[tuple[Chosen, ...]]]:
        """As `BatchEngine.step`."""
        length = max((len(step.tokens) for step in steps), default=0)
        fitting = self._decode if length == 1 else self._check
        name = next((name for lanes, name in fitting.items() if lanes >= len(steps)), None)
        if name is None or not 1 <= length <= self.guess:
            given = f"{len(steps)} lanes with up to {length} tokens"
            raise InputError(f"given {given}, expected 1 to {self.lanes} with up to {self.guess}")
        turn = self._functions[name].turn()
        if length == 1:
            turn.put_all(steps)
            wait = turn.launch([LaneRow(step.lane, step.position + 1, step.mask) for step in steps])
            return lambda: [(choice,) for choice in wait()]
        for row, step in enumerate(steps):
            turn.put(row, step.tokens, step.position, step.pages)
        turn.leave_idle(len(steps))
        rows = [row for step in steps for row in _rows(step, self.guess, self.lanes)]
        wait = turn.launch(rows)
        return lambda: _accepted(steps, wait(), self.guess)

    def copy_page(self, source: int, target: int) -> None:
        """As `BatchEngine.copy_page`."""
        self._copy(source, target)


def _rows(step: LaneStep, count: int, nobody: int) -> list[LaneRow]:
    """For whom the `count` rows of a lane choose; those behind its tokens are nobody's."""
    behind = [LaneRow(nobody, 0)] * (count - len(step.tokens))
    own = (LaneRow(step.lane, step.position + 1 + i, None if i else step.mask) for i in range(len(step.tokens)))
    return [*own, *behind]


def _accepted(steps: Sequence[LaneStep], chosen: Sequence[Chosen], count: int) -> list[tuple[Chosen, ...]]:
    """What a step with guesses adds to each text."""
    return [accepted(step.tokens, chosen[row * count :][: len(step.tokens)]) for row, step in enumerate(steps)]


def _pools(batch: BatchSpec, executor: Executor, device: Device) -> list[NPUBuffer]:
    """Memory for all pages, zeros: what a mask closes must be finite all the same."""
    specs = {spec.name: spec for spec in executor.plan.inputs}
    step = next(iter(batch.functions.values()))
    own = [specs[name] for name, _ in step.pools]
    memory = device.backend.allocate_all([spec.nbytes for spec in own])
    for piece in memory:
        device.backend.clear(piece)
    return [NPUBuffer(device, piece, spec) for piece, spec in zip(memory, own, strict=True)]


class _Scene:
    """What the turns of a function share: memory on the device, and the plans around it.

    Attributes:
        step: The function.
        idle: The page that nobody reads.
    """

    def __init__(
        self, engine: PagedEngine, step: BatchStepSpec, executor: Executor, pools: Sequence[NPUBuffer], weights: Weights
    ) -> None:
        device = self.device = engine.device
        self.step, self.idle = step, engine.pages
        specs = {spec.name: spec for spec in executor.plan.inputs}
        self._names = [name for name in (step.tokens, step.positions, step.tables, step.last) if name]
        self.staged = [specs[name] for name in self._names]
        given = [(f"input_{i}", spec.shape, str(spec.host_dtype)) for i, spec in enumerate(self.staged)]
        self._staging = Executor(compile(staging_ir(given), device.target, engine.spec.dtype), device)
        self._there = [device_buffer(device, spec) for spec in self.staged]
        self._chooser, self._scorer = engine.chooser, engine.scorer
        logits = next(spec for spec in executor.plan.outputs if spec.name == step.logits)
        self._logits = device_buffer(device, logits)
        inputs = dict(zip(self._names, self._there, strict=True))
        inputs |= {name: pool for (name, _), pool in zip(step.pools, pools, strict=True)}
        self._function = executor.bind(inputs, {step.logits: self._logits}, weights)

    def record(self, inputs: Sequence[NPUBuffer], features: frozenset[Feature] | None) -> _Call:
        """A call of the function, from staged inputs to the chosen tokens; to the logits where features are None."""
        choice = None if features is None else self._chooser.bind(self._logits, features)
        return _Call(self._recorded(inputs, choice.plans if choice else ()), choice)

    def record_scores(self, inputs: Sequence[NPUBuffer]) -> _ScoringCall:
        """A call of the function, from staged inputs to scores."""
        scores = self._scorer.bind(self._logits)
        return _ScoringCall(self._recorded(inputs, [scores.plan]), scores)

    def _recorded(self, inputs: Sequence[NPUBuffer], behind: Sequence[BoundPlan]) -> Recording:
        given = {f"input_{i}": buffer for i, buffer in enumerate(inputs)}
        there = {f"input_{i}_there": buffer for i, buffer in enumerate(self._there)}
        return self.device.backend.record([self._staging.bind(given, there), self._function, *behind])

    def features(self, rows: Sequence[LaneRow]) -> frozenset[Feature] | None:
        """What a choice for rows has to do; None where there are none."""
        return self._chooser.features(rows) if rows else None


class _Call(NamedTuple):
    """A function and the choice behind it, ready to launch."""

    recording: Recording
    choice: BoundChoice | None


class _ScoringCall(NamedTuple):
    """A function and the scores behind it, ready to launch."""

    recording: Recording
    scores: BoundScores


def device_buffer(device: Device, spec: BufferSpec) -> NPUBuffer:
    return NPUBuffer(device, device.backend.allocate(spec.nbytes), spec)


class _Function:
    """Calls of one function, each in the next of some turns."""

    def __init__(self, scene: _Scene) -> None:
        self._turns = [_Turn(scene) for _ in range(_TURNS)]
        self._next = 0

    def turn(self) -> _Turn:
        """The next turn, once what was asked for in it before has run."""
        found = self._turns[self._next]
        self._next = (self._next + 1) % _TURNS
        found.free()
        return found


class _Turn:
    """One call of a function: its inputs, in memory that host and device see; what they hold at a launch counts."""

    def __init__(self, scene: _Scene) -> None:
        self._scene = scene
        arrays, self._buffers = zip(*(_visible(scene.device, spec) for spec in scene.staged), strict=True)
        self._tokens, self._positions, self._tables, *last = arrays
        self._last = last[0] if last else None
        self._pages: list[list[int]] = [[]] * scene.step.lanes
        self._used = 0  # lanes of the last call
        self._tables[...] = scene.idle
        self._tokens[...] = 0
        self._positions[...] = _NOBODY
        self._calls: dict[frozenset[Feature] | None, _Call] = {}
        self._scoring: _ScoringCall | None = None
        self._pending: _Result | None = None

    def free(self) -> None:
        """Waits for the last call; what it gave is kept for whoever asks for it."""
        if self._pending is not None:
            self._pending.settle()
            self._pending = None

    def put(self, row: int, tokens: Sequence[int], position: int, pages: Sequence[int]) -> None:
        """Gives a lane's tokens, the first of them at a position, and its pages."""
        count = len(tokens)
        self._tokens[row, :count], self._tokens[row, count:] = tokens, 0
        self._positions[row, :count] = np.arange(position, position + count)
        self._positions[row, count:] = _NOBODY
        if pages != self._pages[row]:
            self._put_pages(row, pages)

    def put_all(self, steps: Sequence[LaneStep]) -> None:
        """Gives all lanes their tokens, one each; for the function that takes so many. A call for each lane is slow."""
        self._tokens[: len(steps), 0] = [step.tokens[0] for step in steps]
        self._positions[: len(steps), 0] = [step.position for step in steps]
        for row, (step, pages) in enumerate(zip(steps, self._pages, strict=False)):
            if step.pages != pages:
                self._put_pages(row, step.pages)
        self.leave_idle(len(steps))

    def _put_pages(self, row: int, pages: Sequence[int]) -> None:
        """Writes a lane's table, whose places behind the last page name the one that nobody reads."""
        table, count = self._tables[row], len(pages)
        table[:count] = pages
        table[count : len(self._pages[row])] = self._scene.idle
        self._pages[row] = list(pages)

    def leave_idle(self, first: int) -> None:
        """Leaves the lanes from one on out of the call."""
        if first < self._used:
            self._positions[first : self._used] = _NOBODY
            self._tables[first : self._used] = self._scene.idle
            self._pages[first : self._used] = [[]] * (self._used - first)
        self._used = first

    def set_last(self, last: int) -> None:
        """Says which token's logits are wanted."""
        assert self._last is not None
        self._last[0] = last

    def launch(self, rows: Sequence[LaneRow]) -> _Result:
        """Asks for the call, and for choices from the first rows of its logits; gives what waits for these."""
        features = self._scene.features(rows)
        call = self._calls.get(features)
        if call is None:
            call = self._calls[features] = self._scene.record(self._buffers, features)
        if call.choice is not None:
            call.choice.put(rows)
        self._pending = _Result(call.recording.launch(), call.choice)
        return self._pending

    def score(self, tokens: Sequence[int], best: int) -> _Result:
        """Asks for the call, and for scores of tokens by the first rows of its logits; gives what waits for them."""
        if self._scoring is None:
            self._scoring = self._scene.record_scores(self._buffers)
        self._scoring.scores.put(tokens, best)
        self._pending = _Result(self._scoring.recording.launch(), self._scoring.scores)
        return self._pending


class _Result:
    """What a call gives, once it has been waited for."""

    def __init__(self, wait: Callable[[], None], choice: BoundChoice | BoundScores | None) -> None:
        self._wait: Callable[[], None] | None = wait
        self._choice = choice
        self._chosen: tuple[Chosen, ...] = ()
        self._error: NPUError | None = None

    def settle(self) -> None:
        """Waits; an error is kept for `__call__`."""
        if self._wait is None:
            return
        wait, self._wait = self._wait, None
        try:
            wait()
            self._chosen = () if self._choice is None else self._choice.read()
        except NPUError as error:
            self._error = error

    def __call__(self) -> tuple[Chosen, ...]:
        """The choices, in the order of the rows.

        Raises:
            InputError: A table names a page that there is none of.
            DeviceError: The device failed, or logits are no numbers.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        return self._chosen


class _PageCopy:
    """Copies a page of every pool to another place."""

    def __init__(self, engine: PagedEngine, made: Sequence[NPUBuffer]) -> None:
        assert engine.spec.batch is not None
        device, shapes, dtype = engine.device, engine.spec.batch.pool_shapes, engine.spec.dtype
        read = Executor(compile(page_read_ir(shapes, dtype), device.target, dtype), device)
        write = Executor(compile(page_write_ir(shapes, dtype), device.target, dtype), device)
        pools = {f"pool_{number}": pool for number, pool in enumerate(made)}
        pages = {spec.name: device_buffer(device, spec) for spec in read.plan.outputs}
        named = {spec.name: spec for executor in (read, write) for spec in executor.plan.inputs}
        self._source, source = _visible(device, named["source"])
        self._target, target = _visible(device, named["target"])
        taken: BoundPlan = read.bind(pools | {"source": source}, pages)
        put: BoundPlan = write.bind(pools | pages | {"target": target}, {})
        self._recording = device.backend.record([taken, put])
        self._wait: Callable[[], None] | None = None

    def __call__(self, source: int, target: int) -> None:
        if self._wait is not None:
            self._wait()
        self._source[0], self._target[0] = source, target
        self._wait = self._recording.launch()


def _visible(device: Device, spec: BufferSpec) -> tuple[NDArray[Any], NPUBuffer]:
    """Memory that host and device see: as the host does, and as the device does."""
    memory = device.backend.allocate_visible(spec.nbytes)
    with memory.writing() as content:
        array = spec.layout.view(content.view(spec.dtype.numpy))
    return array, NPUBuffer(device, memory, spec)
