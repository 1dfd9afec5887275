"""A language model on a device: its functions, and sequences of tokens with their key/value caches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.generation_spec import GenerationSpec, StepSpec
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile
from npu_compiler.dtypes import dtype
from npu_compiler.errors import InputError
from npu_compiler.partitioner import PartitionPlan
from npu_runtime.backend import BoundPlan
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.workspace import Workspace
from npu_text.step_check import check_steps
from npu_text.step_functions import (
    PartitionedFunctions,
    ProgramFunctions,
    StepFunction,
    StepFunctions,
    Tensor,
    device_buffer,
    open_program,
)

__all__ = ["Chunk", "LanguageModel", "TokenSequence", "plan_chunks"]


class LanguageModel:
    """The functions of a language model, with their weights.

    Attributes:
        spec: What the functions take and give.
        device: Where they run.
        functions: What runs them.
    """

    def __init__(
        self,
        folder: Path,
        device: Device,
        program: CompiledProgram | None = None,
        plans: Mapping[str, PartitionPlan] | None = None,
    ) -> None:
        """Compiles the model where that was not done yet, and loads its weights once for all functions.

        Args:
            folder: What `npu extract-llm` made.
            device: Where to run.
            program: The folder's IRs, already compiled.
            plans: The folder's IRs, partitioned, by the names of the functions; instead of a program.

        Raises:
            NPUError: The folder is incomplete or damaged, or the device cannot hold or run the model.
        """
        if program is not None and plans is not None:
            raise InputError("given both a program and partition plans, expected one of them")
        self.spec = GenerationSpec.load(folder)
        self.device = device
        self._names = {step.length: name for name, step in self.spec.functions.items()}
        weights = folder / self.spec.weights
        irs = {name: step.ir for name, step in self.spec.functions.items()}
        self.functions: StepFunctions
        if plans is not None:
            check_steps(self.spec, plans)
            self.functions = PartitionedFunctions(plans, weights, device)
        else:
            program = program or open_program(folder, irs, device.target)
            check_steps(self.spec, program.functions)
            self.functions = ProgramFunctions(program, weights, device)
        self._ready: dict[str, StepFunction] = {}
        self._beside: dict[tuple[object, ...], Executor] = {}
        self._lock = Lock()

    @property
    def lengths(self) -> list[int]:
        """How many tokens the functions take, ascending; the first is 1."""
        return sorted(self._names)

    def step(self, length: int) -> tuple[StepSpec, StepFunction]:
        """The function for `length` tokens, which is made ready when it is first asked for."""
        name = self._names[length]
        with self._lock:
            if name not in self._ready:
                self._ready[name] = self.functions.prepare(name)
            return self.spec.functions[name], self._ready[name]

    @property
    def updates_in_place(self) -> bool:
        """Whether the device does all of a step of one token, and updates the caches where they lie."""
        step, function = self.step(1)
        return function.plan is not None and set(step.caches) == {(name, out) for out, name in function.plan.state}

    def beside(self, make: Callable[..., dict[str, Any]], *arguments: Hashable) -> Executor:
        """A function of the project's own that runs beside a step; made ready when it is first asked for.

        Texts in several threads, which share it, wait for each other's turn.

        Args:
            make: Gives its IR.
            arguments: For `make`.
        """
        with self._lock:
            if (make, arguments) not in self._beside:
                program = compile(make(*arguments), self.device.target, self.spec.dtype)
                workspace = Workspace(self.device.backend)
                self._beside[make, arguments] = Executor(program, self.device, workspace=workspace)
            return self._beside[make, arguments]

    def bind_step(
        self, tokens: NPUBuffer, positions: NPUBuffer, caches: Sequence[NPUBuffer]
    ) -> tuple[BoundPlan, NPUBuffer]:
        """The function for one token on memory that stays, where the device `updates_in_place`; and its logits."""
        step, function = self.step(1)
        if function.plan is None or function.bind is None:
            raise InputError("given a model that the device does not run as a whole, expected one for `bind_step`")
        spec = next(spec for spec in function.plan.outputs if spec.name == step.logits)
        logits = device_buffer(self.device, spec)
        given = {name: cache for (name, _), cache in zip(step.caches, caches, strict=True)}
        return function.bind(given | {step.tokens: tokens, step.positions: positions}, {step.logits: logits}), logits

    def begin(self) -> TokenSequence:
        """An empty sequence."""
        return TokenSequence(self)


class TokenSequence:
    """The tokens of one text, and the caches with their keys and values, which each step updates in place.

    Attributes:
        model: What it runs on.
        tokens: All tokens so far.
        caches: In the order of `GenerationSpec.cache_shapes`.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.tokens: list[int] = []
        step, function = model.step(1)
        specs = [function.input_specs.get(name) for name, _ in step.caches]
        backend = model.device.backend
        memory = iter(backend.allocate_all([spec.nbytes for spec in specs if spec is not None]))
        self.caches: list[Tensor] = []
        for spec, (shape, kind) in zip(specs, model.spec.caches, strict=True):
            if spec is None:
                self.caches.append(np.zeros(shape, dtype(kind).numpy))
            else:
                cache = NPUBuffer(model.device, next(memory), spec)
                backend.clear(cache.data)
                self.caches.append(cache)

    @property
    def last_position(self) -> int:
        """Of the latest token."""
        return len(self.tokens) - 1

    def advance(self, tokens: Sequence[int]) -> Tensor:
        """Takes more tokens, in chunks where they are many.

        Args:
            tokens: At least one, and in all no more than the cache holds.

        Returns:
            The logits [1, 1, V] of the last of them.

        Raises:
            InputError: More tokens than the cache holds.
        """
        spec, before = self.model.spec, len(self.tokens)
        self.append(tokens)
        for chunk in plan_chunks(before, len(self.tokens), self.model.lengths, spec.cache_length):
            logits = self._run(chunk)
        return logits

    def append(self, tokens: Sequence[int]) -> None:
        """Has more tokens, whose keys and values somebody else brings into the caches.

        Raises:
            InputError: As `advance`.
        """
        before, length = len(self.tokens), self.model.spec.cache_length
        if not tokens or before + len(tokens) > length:
            raise InputError(
                f"given {len(tokens)} tokens after {before}, expected at least one and at most {length} in all, which "
                "the cache holds; extract the model with a longer one: npu extract-llm --cache"
            )
        self.tokens += tokens

    def _run(self, chunk: Chunk) -> Tensor:
        step, function = self.model.step(chunk.length)
        tokens = np.zeros((1, chunk.length), np.int64)  # any token fills up: no real one sees its keys and values
        tokens[0, : chunk.end - chunk.start] = self.tokens[chunk.start : chunk.end]
        arrays = {step.tokens: tokens, step.positions: np.arange(chunk.start, chunk.start + chunk.length)}
        if step.last:
            arrays[step.last] = np.array([chunk.end - chunk.start - 1])
        inputs = {name: self._on_device(array, name, function) for name, array in arrays.items()}
        inputs.update({name: cache for (name, _), cache in zip(step.caches, self.caches, strict=True)})
        outputs = function.run(inputs)
        self.caches = [outputs[updated] for _, updated in step.caches]
        return outputs[step.logits]

    def _on_device(self, array: NDArray[Any], name: str, function: StepFunction) -> Tensor:
        spec = function.input_specs.get(name)
        return array if spec is None else NPUBuffer.from_numpy(array, self.model.device, spec=spec)


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a sequence, for a function that takes `length`."""

    start: int
    end: int
    length: int


def plan_chunks(start: int, end: int, lengths: Sequence[int], cache_length: int) -> Iterator[Chunk]:
    """Divides tokens among functions: the longest while it can be filled, then the shortest that takes the rest.

    A function that is not filled writes to the cache behind the end of the sequence, where later tokens overwrite it
    before any of them looks. Where that would be behind the end of the cache, it starts earlier and computes some
    tokens again.

    Args:
        start: The first token that is not in the cache yet.
        end: Number of tokens in all; at most `cache_length`.
        lengths: How many tokens the functions take, ascending.
        cache_length: Places of the cache; no less than the greatest length.
    """
    while start < end:
        length = next((n for n in lengths if n >= end - start), lengths[-1])
        start = min(start, cache_length - length)
        yield Chunk(start, min(start + length, end), length)
        start += length
