"""An engine of a batch whose keys and values lie in pages: a step is one launch on the device.

Where masks say which tokens may be chosen it is two: they are made while the layers run, ahead of the choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.batch_spec import BatchSpec
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile
from npu_compiler.errors import InputError
from npu_compiler.graph.page_copies import page_read_ir, page_write_ir
from npu_runtime.backend import BoundPlan, Launched, Recording
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_text.batching.bound_choice import LaneGroup
from npu_text.batching.choosing import LaneChooser, accepted
from npu_text.batching.engine import Chosen, Filling, LaneSampling, LaneSteps, Prefill, Stepped
from npu_text.batching.lane_sampling import check_sampling
from npu_text.batching.scoring import TokenScorer
from npu_text.batching.step_calls import (
    TURNS,
    LogitReaders,
    Scene,
    StepCalls,
    StepResult,
    StepTurn,
)
from npu_text.step_check import check_batch
from npu_text.step_functions import ProgramFunctions, device_buffer, open_program, visible

__all__ = ["PagedEngine"]

_COPIES = 4  # of pages, that may be queued behind prompts


class PagedEngine:
    """A `BatchEngine` on one device.

    A page's number is that of its place in each pool; behind the last one the pools have a page that nobody reads, for
    lanes and tokens that are nobody's.

    Attributes:
        spec: What the functions take and give.
        device: Where they run.
        chooser: What chooses tokens.
        scorer: What scores those of prompts.
        lanes, page_tokens, pages, context, vocabulary, chunks, packs, guess: As `BatchEngine` says.
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
        self._decode, self._check, self._fill = batch.decode, batch.check, batch.chunks
        self.lanes, self.page_tokens, self.pages = max(self._decode), batch.page_tokens, batch.pages
        self.context, self.vocabulary, self.chunks = batch.context, spec.vocabulary, tuple(self._fill)
        packs = {length: tuple(lanes for lanes in names if lanes > 1) for length, names in self._fill.items()}
        self.packs: Mapping[int, tuple[int, ...]] = packs
        self.guess = batch.guess
        irs = {name: step.ir for name, step in batch.functions.items()}
        program = program or open_program(folder, irs, device.target, "batch")
        check_batch(batch, spec.vocabulary, program.functions)
        self.chooser = LaneChooser(device, spec.vocabulary, spec.dtype, self.lanes)
        self.scorer = TokenScorer(device, spec.dtype)
        functions = ProgramFunctions(program, folder / spec.weights, device)
        self._beside = device.sibling()  # where prompts are filled in while texts go on
        fills = {name for names in self._fill.values() for name in names.values()}
        rows = self.lanes * max(self.guess, 1)
        chosen = [device.backend.allocate_visible(8 * rows) for _ in range(TURNS)]  # int64, by steps in turns
        executors = {  # all of them, ahead of any recording
            name: functions.executor(name, self._beside if name in fills else None) for name in batch.functions
        }
        pools = _pools(batch, executors[next(iter(executors))], device)
        readers = LogitReaders(self.chooser, self.scorer)
        stepping = readers._replace(chosen=chosen)
        self._functions = {
            name: StepCalls(
                Scene(
                    batch.functions[name],
                    executor,
                    pools,
                    functions.weights,
                    readers if name in fills else stepping,
                    self.pages,
                )
            )
            for name, executor in executors.items()
        }
        self._copy = _PageCopy(self, self._beside, pools)
        self._tables = _LaneTables(self.lanes, batch.context // batch.page_tokens, batch.pages)
        self._group: LaneGroup | None = None  # of the last step
        self._number = 0  # of the turn that the next step takes
        self._steps: list[StepResult[Stepped] | None] = [None] * TURNS  # by their turns' numbers
        self._filling: dict[int, object] = {}  # lanes whose last fill may be under way, each with what waits for it

    def check(self, sampling: LaneSampling, scored: int | None, masked: bool) -> None:
        """As `BatchEngine.check`."""
        check_sampling(sampling, self.vocabulary)
        check_sampling(LaneSampling(best=scored), self.vocabulary)

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None:
        """As `BatchEngine.begin`."""
        self._group = None
        self.chooser.begin(lane, sampling, tokens)

    def prefill(self, *parts: Prefill) -> Filling:
        """As `BatchEngine.prefill`."""
        counts = [len(part.tokens) for part in parts]
        functions = next((self._fill[n] for n in self.chunks if n >= max(counts, default=0)), {})
        name = next((name for lanes, name in functions.items() if lanes >= len(parts)), "")
        if not name or not parts or not all(counts):
            given = f"{', '.join(map(str, counts))} tokens of {len(parts)} prompts"
            raise InputError(f"given {given}, expected 1 to {self.chunks[-1]} of one, or of as many as {self.packs}")
        if len(parts) > 1 and any(part.scored is not None for part in parts):
            raise InputError(f"given {len(parts)} prompts with scored ones among them; score each by itself")
        if parts[0].scored is not None:
            return self._scored(parts[0], parts[0].scored)
        turn = self._functions[name].turn()
        turn.put_parts(parts)
        result = turn.launch(None, turn.positions, ())
        self._filling |= {part.lane: result for part in parts}

        def filled() -> tuple[Chosen, ...]:
            result()
            for part in parts:
                if self._filling.get(part.lane) is result:
                    del self._filling[part.lane]
            return ()

        return _Filling(filled, [result])

    def _scored(self, part: Prefill, best: int) -> Filling:
        """Tokens of one text as the lanes of decode steps, for chunks give no logits.

        All lanes of a step write their keys before any reads, so each token sees those before it.
        """
        count = len(part.tokens)
        tokens, positions = np.array(part.tokens, np.int64), np.arange(part.position, part.position + count)
        lanes, pages = np.full(count, part.lane), [tuple(part.pages)] * count
        following = [*part.tokens[1:], *([] if part.following is None else [part.following])]
        waits: list[StepResult[tuple[Chosen, ...]]] = []
        for start in range(0, count, self.lanes):
            some = slice(start, start + self.lanes)
            steps = LaneSteps(lanes[some], tokens[some], positions[some], pages[some])
            turn = self._turn(len(steps.lanes), self._decode, steps)
            waits.append(turn.score(following[some], best))
        return _Filling(lambda: tuple(score for wait in waits for score in wait()), waits)

    def step(self, steps: LaneSteps) -> Callable[[], Stepped]:
        """As `BatchEngine.step`."""
        count, length = len(steps.lanes), 1 + max(map(len, steps.guesses), default=0)
        if not 1 <= count <= self.lanes or length > self.guess:
            given = f"{count} lanes with up to {length} tokens"
            raise InputError(f"given {given}, expected 1 to {self.lanes} with up to {self.guess}")
        if length == 1:
            return self._launched(self._step(steps))
        turn = self._turn(count, self._check, steps)
        lanes = np.where(turn.positions[:count] < 0, self.lanes, steps.lanes[:, None]).reshape(-1)  # or nobody's
        masks = [(source, place * self.guess) for source, place in steps.masks]
        result = self._launched(turn.launch(self.chooser.group(lanes), turn.positions[:count].reshape(-1) + 1, masks))
        return lambda: _accepted(steps, result(), self.guess)

    def _step(self, steps: LaneSteps) -> StepResult[Stepped]:
        """A step of one token for each lane."""
        turn = self._turn(len(steps.lanes), self._decode, steps)
        if self._group is None or self._group.lanes is not steps.lanes:
            self._group = self.chooser.group(steps.lanes)
        return turn.launch(self._group, steps.positions + 1, steps.masks)

    def _launched(self, result: StepResult[Stepped]) -> StepResult[Stepped]:
        """The next step takes the other turn, and may go on from what this one chooses."""
        self._steps[self._number] = result
        self._number = (self._number + 1) % TURNS
        return result

    def _turn(self, lanes: int, functions: Mapping[int, str], steps: LaneSteps) -> StepTurn:
        """The next turn of the function for the fewest lanes that hold these, with their step."""
        if self._filling and not self._filling.keys().isdisjoint(steps.lanes.tolist()):
            self.device.backend.wait_for(self._beside.backend)
        before = self._steps[self._number]  # whose choices lie where this one's will
        if before is not None:
            before.settle()
        turn = self._functions[next(name for most, name in functions.items() if most >= lanes)].numbered(self._number)
        self._tables.put(steps.lanes, steps.pages)
        turn.put(steps, self._tables.content)
        return turn

    def copy_page(self, source: int, target: int) -> None:
        """As `BatchEngine.copy_page`."""
        self._copy(source, target)


@dataclass(frozen=True)
class _Filling:
    """See `engine.Filling`: what `filled` gives, once `results` are there."""

    filled: Callable[[], tuple[Chosen, ...]]
    results: Sequence[StepResult[Any]]

    def __call__(self) -> tuple[Chosen, ...]:
        return self.filled()

    def is_done(self) -> bool:
        return all(result.is_done() for result in self.results)


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


@dataclass
class _CopyTurn:
    """A copy of a page that may be under way: its numbers are the device's until it has run."""

    source: NDArray[Any]
    target: NDArray[Any]
    recording: Recording
    launched: Launched = field(default_factory=Launched)


class _PageCopy:
    """Copies a page of every pool to another place, in the order of what is filled in.

    Steps do not wait for it: who reads the copy is filled in behind it.
    """

    def __init__(self, engine: PagedEngine, device: Device, made: Sequence[NPUBuffer]) -> None:
        assert engine.spec.batch is not None
        dtype = engine.spec.dtype
        held = engine.spec.batch.pools(dtype)
        read = Executor(compile(page_read_ir(held, dtype), device.target), device)
        write = Executor(compile(page_write_ir(held, dtype), device.target), device)
        pools = {f"pool_{number}": pool for number, pool in enumerate(made)}
        pages = {spec.name: device_buffer(device, spec) for spec in read.plan.outputs}
        named = {spec.name: spec for executor in (read, write) for spec in executor.plan.inputs}
        self._turns: deque[_CopyTurn] = deque()  # the one that was launched longest ago first
        for _ in range(_COPIES):
            source_array, source = visible(device, named["source"])
            target_array, target = visible(device, named["target"])
            taken: BoundPlan = read.bind(pools | {"source": source}, pages)
            put: BoundPlan = write.bind(pools | pages | {"target": target}, {})
            self._turns.append(_CopyTurn(source_array, target_array, device.backend.record([taken, put])))

    def __call__(self, source: int, target: int) -> None:
        turn = self._turns[0]
        self._turns.rotate(-1)
        turn.launched()
        turn.source[0], turn.target[0] = source, target
        turn.launched = turn.recording.launch()
