"""An engine of a batch whose keys and values lie in pages: a step is one launch on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.batch_spec import BatchSpec, BatchStepSpec
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile
from npu_compiler.errors import DeviceError, InputError
from npu_compiler.graph.lane_tokens import Feature
from npu_compiler.graph.next_token import NO_NUMBER, next_tokens_ir
from npu_compiler.graph.page_copies import page_read_ir, page_write_ir, staging_ir
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.backend import BoundPlan, Recording
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.weight_loader import Weights
from npu_text.batching.choosing import BoundChoice, LaneChooser, LaneRow, check_sampling
from npu_text.batching.engine import Chosen, LaneSampling, LaneStep, Prefill, Prefilled
from npu_text.sampling import not_a_number
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
        lanes, page_tokens, pages, context, vocabulary, chunks, guess: As `BatchEngine` says.
    """

    guess = 1

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
        self.batch: BatchSpec = batch
        self._decode, self._chunk = batch.decode, batch.chunks
        self.lanes, self.page_tokens, self.pages = max(self._decode), batch.page_tokens, batch.pages
        self.context, self.vocabulary, self.chunks = batch.context, spec.vocabulary, tuple(self._chunk)
        irs = {name: step.ir for name, step in batch.functions.items()}
        program = program or open_program(folder, irs, device.target, "batch")
        functions = ProgramFunctions(program, folder / spec.weights, device)
        executors = {name: functions.executor(name) for name in batch.functions}  # all of them, ahead of any recording
        self._pools = _pools(batch, executors[next(iter(executors))], device)
        self.chooser = LaneChooser(device, spec.vocabulary, spec.dtype, self.lanes)
        scenes = {
            name: _Scene(self, batch.functions[name], executor, self._pools, functions.weights)
            for name, executor in executors.items()
        }
        self._functions = {name: _Function(scene) for name, scene in scenes.items()}
        self._copy = _PageCopy(self)

    def check(self, sampling: LaneSampling, scored: int | None, masked: bool) -> None:
        """As `BatchEngine.check`."""
        check_sampling(sampling, self.vocabulary)
        if scored is not None:
            raise InputError(
                "given a prompt to be scored: functions for many texts give the logits of a prompt's last token alone; "
                "leave out echo or logprobs"
            )

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None:
        """As `BatchEngine.begin`."""
        self.chooser.begin(lane, sampling, tokens)

    def prefill(self, part: Prefill) -> Callable[[], Prefilled]:
        """As `BatchEngine.prefill`."""
        count = len(part.tokens)
        length = next((n for n in self.chunks if n >= count), 0)
        if not count or not length or part.scored is not None:
            raise InputError(f"given {count} tokens of lane {part.lane}, expected 1 to {self.chunks[-1:]} without more")
        turn = self._functions[self._chunk[length]].turn()
        turn.tokens[0, :count] = part.tokens
        turn.tokens[0, count:] = 0
        turn.positions[0, :count] = np.arange(part.position, part.position + count)
        turn.positions[0, count:] = _NOBODY
        turn.set_pages(0, part.pages)
        turn.set_last(count - 1)
        wait = turn.launch([LaneRow(part.lane, part.position + count, part.mask)] if part.choose else [])

        def finish() -> Prefilled:
            chosen = wait()
            return Prefilled(chosen[0] if part.choose else None)

        return finish

    def step(self, steps: Sequence[LaneStep]) -> Callable[[], Sequence[tuple[Chosen, ...]]]:
        """As `BatchEngine.step`."""
        count = len(steps)
        name = next((name for lanes, name in self._decode.items() if lanes >= count), None)
        if not count or name is None:
            raise InputError(f"given {count} lanes, expected 1 to {self.lanes}")
        if any(len(step.tokens) != 1 for step in steps):
            raise InputError("given a guess, expected one token of each lane")
        turn = self._functions[name].turn()
        turn.tokens[:count, 0] = [step.tokens[0] for step in steps]
        turn.positions[:count, 0] = [step.position for step in steps]
        for row, step in enumerate(steps):
            turn.set_pages(row, step.pages)
        turn.leave_idle(count)
        wait = turn.launch([LaneRow(step.lane, step.position + 1, step.mask) for step in steps])
        return lambda: [(chosen,) for chosen in wait()[:count]]

    def copy_page(self, source: int, target: int) -> None:
        """As `BatchEngine.copy_page`."""
        self._copy(source, target)


def _chosen(token: int) -> Chosen:
    if token == NO_NUMBER:
        raise not_a_number("no number")
    return Chosen(token)


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
        self.chooser = engine.chooser
        self.step, self.idle = step, engine.pages
        specs = {spec.name: spec for spec in executor.plan.inputs}
        self._names = [name for name in (step.tokens, step.positions, step.tables, step.last) if name]
        self.staged = [specs[name] for name in self._names]
        given = [(f"input_{i}", spec.shape, str(spec.host_dtype)) for i, spec in enumerate(self.staged)]
        self._staging = Executor(compile(staging_ir(given), device.target, engine.spec.dtype), device)
        self._choice = _choice(engine, step.lanes)
        self._there = [device_buffer(device, spec) for spec in self.staged]
        logits = next(spec for spec in executor.plan.outputs if spec.name == step.logits)
        self._logits = device_buffer(device, logits)
        inputs = dict(zip(self._names, self._there, strict=True))
        inputs |= {name: pool for (name, _), pool in zip(step.pools, pools, strict=True)}
        self._function = executor.bind(inputs, {step.logits: self._logits}, weights)

    def record(self, inputs: Sequence[NPUBuffer], chosen: NPUBuffer) -> Recording:
        """A call of the function from staged inputs to the chosen tokens, the likeliest ones."""
        choice = self._choice.bind({"logits": self._logits}, {"chosen": chosen})
        return self._recorded(inputs, [choice])

    def record_choice(self, inputs: Sequence[NPUBuffer], features: frozenset[Feature]) -> tuple[BoundChoice, Recording]:
        """A call of the function from staged inputs to tokens that are chosen as lanes ask for it."""
        choice = self.chooser.bind(self._logits, features)
        return choice, self._recorded(inputs, choice.plans)

    def _recorded(self, inputs: Sequence[NPUBuffer], choice: Sequence[BoundPlan]) -> Recording:
        given = {f"input_{i}": buffer for i, buffer in enumerate(inputs)}
        there = {f"input_{i}_there": buffer for i, buffer in enumerate(self._there)}
        staging = self._staging.bind(given, there)
        return self.device.backend.record([staging, self._function, *choice])

    @property
    def chosen(self) -> BufferSpec:
        """How the chosen tokens lie."""
        return self._choice.plan.outputs[0]


def _choice(engine: PagedEngine, lanes: int) -> Executor:
    """What chooses the next token of each lane, given ``logits``; ``chosen`` int64 [lanes, 1]."""
    spec = engine.spec
    ir = next_tokens_ir(spec.vocabulary, spec.dtype, lanes)
    return Executor(compile(ir, engine.device.target, spec.dtype), engine.device)


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
    """One call of a function: its inputs and the chosen tokens, in memory that host and device see.

    Attributes:
        tokens, positions: int64 [lanes, length]; what they hold when a call is launched counts.
    """

    def __init__(self, scene: _Scene) -> None:
        self._scene = scene
        arrays, buffers = zip(*(_visible(scene.device, spec) for spec in scene.staged), strict=True)
        self.tokens, self.positions, self._tables, *last = arrays
        self._last = last[0] if last else None
        self._pages: list[tuple[int, ...]] = [()] * scene.step.lanes
        self._used = 0  # lanes of the last call
        self._tables[...] = scene.idle
        self._chosen, chosen = _visible(scene.device, scene.chosen)
        self.tokens[...] = 0
        self.positions[...] = _NOBODY
        self._inputs = buffers
        self._recording = scene.record(buffers, chosen)
        self._choices: dict[frozenset[Feature], tuple[BoundChoice, Recording]] = {}
        self._pending: _Result | None = None

    def free(self) -> None:
        """Waits for the last call; what it gave is kept for whoever asks for it."""
        if self._pending is not None:
            self._pending.settle()
            self._pending = None

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Gives a lane its table, whose places behind the last page name the one that nobody reads."""
        new, old = tuple(pages), self._pages[row]
        if new != old:
            table = self._tables[row]
            table[: len(new)] = new
            table[len(new) : len(old)] = self._scene.idle
            self._pages[row] = new

    def leave_idle(self, first: int) -> None:
        """Leaves the lanes from one on out of the call."""
        if first < self._used:
            self.positions[first : self._used] = _NOBODY
            for row in range(first, self._used):
                self.set_pages(row, ())
        self._used = first

    def set_last(self, last: int) -> None:
        """Says which token's logits are wanted."""
        assert self._last is not None
        self._last[0] = last

    def launch(self, rows: Sequence[LaneRow]) -> _Result:
        """Asks for the call; gives what waits for it and gives the tokens chosen for some rows, the first ones.

        A way of choosing is prepared when it is first asked for.
        """
        features = self._scene.chooser.features(rows)
        if not features:
            self._pending = _Result(self._recording.launch(), partial(self._likeliest, len(rows)))
            return self._pending
        if features not in self._choices:
            self._choices[features] = self._scene.record_choice(self._inputs, features)
        choice, recording = self._choices[features]
        choice.put(rows)
        self._pending = _Result(recording.launch(), choice.read)
        return self._pending

    def _likeliest(self, count: int) -> Sequence[Chosen]:
        return [_chosen(token) for token in self._chosen[:count, 0].tolist()]


class _Result:
    """What a call gives, once it has been waited for."""

    def __init__(self, wait: Callable[[], None], read: Callable[[], Sequence[Chosen]]) -> None:
        self._wait: Callable[[], None] | None = wait
        self._read = read
        self._chosen: Sequence[Chosen] = ()
        self._error: Exception | None = None

    def settle(self) -> None:
        """Waits; an error is kept for `__call__`."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            try:
                wait()
                self._chosen = self._read()
            except (InputError, DeviceError) as error:
                self._error = error

    def __call__(self) -> Sequence[Chosen]:
        """The chosen token of each row.

        Raises:
            InputError: A table names a page that there is none of.
            DeviceError: The device failed.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        return self._chosen


class _PageCopy:
    """Copies a page of every pool to another place."""

    def __init__(self, engine: PagedEngine) -> None:
        device, shapes, dtype = engine.device, engine.batch.pool_shapes, engine.spec.dtype
        read = Executor(compile(page_read_ir(shapes, dtype), device.target, dtype), device)
        write = Executor(compile(page_write_ir(shapes, dtype), device.target, dtype), device)
        pools = {f"pool_{number}": pool for number, pool in enumerate(engine._pools)}
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
