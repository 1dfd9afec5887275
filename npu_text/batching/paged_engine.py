"""An engine of a batch whose keys and values lie in pages: a step is one launch on the device.

Where masks say which tokens may be chosen it is two: they are made while the layers run, ahead of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

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
from npu_text.batching.bound_choice import BoundChoice, LaneGroup
from npu_text.batching.choosing import LaneChooser, accepted
from npu_text.batching.engine import Chosen, LaneSampling, LaneSteps, MaskSource, Prefill, Prefilled, Stepped
from npu_text.batching.lane_sampling import check_sampling
from npu_text.batching.scoring import BoundScores, TokenScorer
from npu_text.step_functions import ProgramFunctions, open_program

__all__ = ["PagedEngine"]

_Given = TypeVar("_Given")
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
        self._tables = _LaneTables(self.lanes, batch.context // batch.page_tokens, batch.pages)
        self._group: LaneGroup | None = None  # of the last step

    def check(self, sampling: LaneSampling, scored: int | None, masked: bool) -> None:
        """As `BatchEngine.check`."""
        check_sampling(sampling, self.vocabulary)
        check_sampling(LaneSampling(best=scored), self.vocabulary)

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None:
        """As `BatchEngine.begin`."""
        self._group = None
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
        turn.put_part(part)
        masks = [(part.mask, 0)] if part.choose and part.mask is not None else []
        lanes, positions = np.array([part.lane]), np.array([part.position + count])
        result = turn.launch(self.chooser.group(lanes) if part.choose else None, positions, masks)
        return lambda: Prefilled(_first(result()) if part.choose else None)

    def _scored(self, part: Prefill, best: int) -> Callable[[], Prefilled]:
        """Tokens of one text as the lanes of decode steps, for chunks give the logits of their last token alone.

        All lanes of a step write their keys before any reads, so each token sees those before it.
        """
        count = len(part.tokens)
        tokens, positions = np.array(part.tokens, np.int64), np.arange(part.position, part.position + count)
        lanes, pages = np.full(count, part.lane), [tuple(part.pages)] * count
        following = [*part.tokens[1:], *([] if part.following is None else [part.following])]
        end, waits = count - part.choose, []
        for start in range(0, end, self.lanes):
            some = slice(start, min(start + self.lanes, end))
            steps = LaneSteps(lanes[some], tokens[some], positions[some], pages[some])
            turn = self._turn(len(steps.lanes), self._decode, steps)
            waits.append(turn.score(following[some], best))
        chosen: Callable[[], Stepped] | None = None
        if part.choose:
            masks = [] if part.mask is None else [(part.mask, 0)]
            chosen = self.step(LaneSteps(lanes[end:], tokens[end:], positions[end:], pages[end:], masks=masks))
        return lambda: Prefilled(
            None if chosen is None else _first(chosen()), tuple(score for wait in waits for score in wait())
        )

    def step(self, steps: LaneSteps) -> Callable[[], Stepped]:
        """As `BatchEngine.step`."""
        count, length = len(steps.lanes), 1 + max(map(len, steps.guesses), default=0)
        if not 1 <= count <= self.lanes or length > self.guess:
            given = f"{count} lanes with up to {length} tokens"
            raise InputError(f"given {given}, expected 1 to {self.lanes} with up to {self.guess}")
        turn = self._turn(count, self._decode if length == 1 else self._check, steps)
        if length == 1:
            if self._group is None or self._group.lanes is not steps.lanes:
                self._group = self.chooser.group(steps.lanes)
            return turn.launch(self._group, steps.positions + 1, steps.masks)
        lanes = np.where(turn.positions[:count] < 0, self.lanes, steps.lanes[:, None]).reshape(-1)  # or nobody's
        masks = [(source, place * self.guess) for source, place in steps.masks]
        result = turn.launch(self.chooser.group(lanes), turn.positions[:count].reshape(-1) + 1, masks)
        return lambda: _accepted(steps, result(), self.guess)

    def _turn(self, lanes: int, functions: Mapping[int, str], steps: LaneSteps) -> _Turn:
        """The next turn of the function for the fewest lanes that hold these, with their step."""
        turn = self._functions[next(name for most, name in functions.items() if most >= lanes)].turn()
        self._tables.put(steps.lanes, steps.pages)
        turn.put(steps, self._tables.content)
        return turn

    def copy_page(self, source: int, target: int) -> None:
        """As `BatchEngine.copy_page`."""
        self._copy(source, target)


def _first(stepped: Stepped) -> Chosen:
    return stepped.chosen(0)[0]


def _accepted(steps: LaneSteps, rows: Stepped, count: int) -> Stepped:
    """What a step with guesses adds to each text, of what the `count` rows of each lane chose."""
    chosen = rows.tokens.reshape(-1, count)
    guessed, told = {}, {}
    for place, (token, guess, found) in enumerate(
        zip(steps.tokens.tolist(), steps.guesses, chosen.tolist(), strict=True)
    ):
        right = accepted([token, *guess], found)
        if right > 1:
            guessed[place] = found[1:right]
        if place * count in rows.told:
            told[place] = tuple(one for row in range(place * count, place * count + right) for one in rows.told[row])
    return Stepped(chosen[:, 0], guessed, told)


class _LaneTables:
    """The pages of each lane.

    Attributes:
        content: int32 [lanes, pages of a text]; behind a lane's last page the one that nobody reads.
    """

    def __init__(self, lanes: int, most: int, idle: int) -> None:
        self.content = np.full((lanes, most), idle, np.int32)
        self._idle = idle
        self._known: list[tuple[int, ...]] = [()] * lanes
        self._last: tuple[object, object] = (None, None)

    def put(self, lanes: NDArray[np.int64], pages: Sequence[tuple[int, ...]]) -> None:
        """Writes the tables of lanes that have other pages than before."""
        if self._last[0] is lanes and self._last[1] is pages:
            return
        for lane, own in zip(lanes.tolist(), pages, strict=True):
            if own is not self._known[lane]:
                self.content[lane, : len(own)], self.content[lane, len(own) :] = own, self._idle
                self._known[lane] = own
        self._last = lanes, pages


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
        """A call of the function, from staged inputs to the chosen tokens; to the logits where features are None.

        Where there are masks, the choice is asked for by itself.
        """
        choice = None if features is None else self._chooser.bind(self._logits, features)
        if choice is None or features is None:
            return _Call(self._recorded(inputs), None, None)
        if Feature.MASK in features:
            return _Call(self._recorded(inputs), choice, self.device.backend.record(choice.plans))
        return _Call(self._recorded(inputs, choice.plans), choice, None)

    def record_scores(self, inputs: Sequence[NPUBuffer]) -> _ScoringCall:
        """A call of the function, from staged inputs to scores."""
        scores = self._scorer.bind(self._logits)
        return _ScoringCall(self._recorded(inputs, [scores.plan]), scores)

    def _recorded(self, inputs: Sequence[NPUBuffer], behind: Sequence[BoundPlan] = ()) -> Recording:
        given = {f"input_{i}": buffer for i, buffer in enumerate(inputs)}
        there = {f"input_{i}_there": buffer for i, buffer in enumerate(self._there)}
        return self.device.backend.record([self._staging.bind(given, there), self._function, *behind])


class _Call(NamedTuple):
    """A function and the choice behind it, ready to launch; `late` is the choice where it is a launch of its own."""

    recording: Recording
    choice: BoundChoice | None
    late: Recording | None


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
        self._tokens, self.positions, self._tables, *last = arrays
        self._last = last[0] if last else None
        self._used = 0  # lanes of the last call
        self._tables[...] = scene.idle
        self._tokens[...] = 0
        self.positions[...] = _NOBODY
        self._calls: dict[frozenset[Feature] | None, _Call] = {}
        self._scoring: _ScoringCall | None = None
        self._pending: _Result[Any] | None = None

    def free(self) -> None:
        """Waits for the last call; what it gave is kept for whoever asks for it."""
        if self._pending is not None:
            self._pending.settle()
            self._pending = None

    def put_part(self, part: Prefill) -> None:
        """Gives the tokens of a prompt, for the function that fills a cache."""
        count, pages = len(part.tokens), len(part.pages)
        self._tokens[0, :count], self._tokens[0, count:] = part.tokens, 0
        self.positions[0, :count] = np.arange(part.position, part.position + count)
        self.positions[0, count:] = _NOBODY
        self._tables[0, :pages], self._tables[0, pages:] = part.pages, self._scene.idle
        if self._last is not None:
            self._last[0] = count - 1

    def put(self, steps: LaneSteps, tables: NDArray[np.int32]) -> None:
        """Gives the tokens of lanes, and their rows of the tables of all lanes; other rows are nobody's."""
        count = len(steps.lanes)
        self._tokens[:count, 0], self.positions[:count, 0] = steps.tokens, steps.positions
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
    ) -> _Result[Stepped]:
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
            call = self._calls[features] = self._scene.record(self._buffers, features)
        if group is not None and call.choice is not None:
            call.choice.put(group, positions)
        waits = [call.recording.launch()]
        if call.choice is not None and call.late is not None:
            with call.choice.masks() as content:
                masks[0][0].write_masks(masks, content)
            waits.append(call.late.launch())
        result = _Result(waits, _nothing if call.choice is None else partial(_stepped, call.choice))
        self._pending = result
        return result

    def score(self, tokens: Sequence[int], best: int) -> _Result[tuple[Chosen, ...]]:
        """Asks for the call, and for scores of tokens by the first rows of its logits; gives what waits for them."""
        if self._scoring is None:
            self._scoring = self._scene.record_scores(self._buffers)
        self._scoring.scores.put(tokens, best)
        result = _Result([self._scoring.recording.launch()], self._scoring.scores.read)
        self._pending = result
        return result


def _nothing() -> Stepped:
    return Stepped(np.empty(0, np.int64))


def _stepped(choice: BoundChoice) -> Stepped:
    tokens, told = choice.read()
    return Stepped(tokens, told={place: (one,) for place, one in told.items()})


class _Result(Generic[_Given]):
    """What a call gives, once it has been waited for."""

    def __init__(self, waits: Sequence[Callable[[], None]], read: Callable[[], _Given]) -> None:
        """Takes what waits for the launches of a call, in order, and what reads its results then."""
        self._waits, self._read = waits, read
        self._given: list[_Given] = []
        self._error: NPUError | None = None

    def settle(self) -> None:
        """Waits; an error is kept for `__call__`."""
        waits, self._waits = self._waits, ()
        if not waits:
            return
        try:
            for wait in reversed(waits):  # the last one tells when all have run
                wait()
            self._given.append(self._read())
        except NPUError as error:
            self._error = error

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
