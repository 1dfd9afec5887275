"""The toy device: its memory is numpy's, and its kernels are the instructions that `toy_compiler` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from time import perf_counter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import dtype
from npu_compiler.errors import DeviceError, KernelCompileError, OutOfMemoryError
from npu_compiler.integers import ceil_div
from npu_compiler.target_api import FUNCTIONS
from npu_runtime import device_api as api

__all__ = ["TOY", "ToyBackend"]

Array = NDArray[Any]
Shape = tuple[int, ...]

TOY = api.DeviceKind("toy", "toy_runtime:ToyBackend", preference=-1, remedy="install numpy")


class ToyBuffer(api.DeviceBuffer):
    """Bytes, each 255 until it is written: NaN, in every floating-point type."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.memory = nbytes, np.full(nbytes, 255, np.uint8)

    @contextmanager
    def writing(self) -> Iterator[NDArray[np.uint8]]:
        yield self.memory

    def reading(self) -> NDArray[np.uint8]:
        return np.broadcast_to(self.memory, self.nbytes)  # read-only


class ToyBackend(api.Backend):
    """The one toy device that every machine has."""

    name, target = "numpy", "toy"

    def __init__(self) -> None:
        self.transfers = api.Transfers()

    @classmethod
    def open(cls, name: str, ordinal: int) -> Self:
        if ordinal:
            raise DeviceError(f"given {name}:{ordinal}, but there is one toy device; call it {name}")
        return cls()

    def allocate(self, nbytes: int) -> ToyBuffer:
        try:
            return ToyBuffer(nbytes)
        except MemoryError:
            raise OutOfMemoryError(f"the host has no {nbytes} bytes left; use a smaller batch") from None

    def prepare(self, plan: api.ExecutionPlan) -> api.PreparedPlan:
        return _ToyPlan(plan)


class _ToyPlan(api.PreparedPlan):
    def __init__(self, plan: api.ExecutionPlan) -> None:
        try:
            kernels = [json.loads(kernel.text) for kernel in plan.kernels]
        except ValueError as error:
            raise KernelCompileError(f"a kernel of the program is no JSON ({error}); compile the model again") from None
        self._steps = [(kernels[step.kernel], step) for step in plan.calls if isinstance(step, api.KernelCall)]
        if len(self._steps) < len(plan.calls):
            raise DeviceError("the program calls a library, which this device has not; compile the model for it")

    def run(self, buffers: Sequence[Any]) -> None:
        self.run_timed(buffers)

    def run_timed(self, buffers: Sequence[Any]) -> list[float]:
        seconds = []
        for kernel, step in self._steps:
            started = perf_counter()
            with np.errstate(all="ignore"):
                _run(kernel, [buffers[argument.buffer].memory[argument.offset :] for argument in step.args])
            seconds.append(perf_counter() - started)
        return seconds


def _run(kernel: Mapping[str, Any], given: Sequence[Array]) -> None:
    """Runs a kernel on the memory that is bound: the output, what it reads, and the record of faults if it has one."""
    kinds = [dtype(name).numpy for name in kernel["memory"]]
    memory: list[Array] = [g[: g.size - g.size % k.itemsize].view(k) for g, k in zip(given, kinds, strict=False)]
    machine = _Machine(kernel["code"], memory, given[-1])
    if kernel["problems"]:
        size, place = kernel["result"]
        result = np.asarray(sum(_placed(machine.solve(problem), place["shape"]) for problem in kernel["problems"]))
        machine.result = np.zeros(size, result.dtype)
        machine.result[_positions(place)] = result
    shape = tuple(kernel["shape"])
    value, where = machine.tensor(kernel["value"], shape), _positions(kernel["place"])
    if "index" in kernel:
        index = machine.tensor(kernel["index"], shape)
        inside = index >= 0  # else there is no such place
        value, where = value[inside], (where + index * kernel["index_stride"])[inside]
    memory[0][where] = value.astype(memory[0].dtype)


def _placed(result: Array, shape: Shape) -> Array:
    """The result of a problem of images as that of lines or volumes: pixels [N, ...] in order, of each its channels."""
    if len(result.shape) == len(shape):
        return result
    return np.moveaxis(np.moveaxis(result, 1, -1).reshape((shape[0], *shape[2:], shape[1])), -1, 1)


def _positions(view: Any) -> Array:
    """Where each element of a view lies: int64, of its shape."""
    steps = [np.arange(size) * stride for size, stride in zip(view["shape"], view["strides"], strict=True)]
    return sum(np.ix_(*steps), np.asarray(view["offset"], np.int64))


class _Machine:
    """Runs instructions, each once for each shape over which it is asked for. Slots are numbers of its `memory`."""

    def __init__(self, code: Sequence[Any], memory: Sequence[Array], faults: Array) -> None:
        self.code, self.memory, self.faults, self.result = code, memory, faults, np.empty(0)
        self._known: dict[tuple[int, Shape], Array] = {}

    def solve(self, problem: Mapping[str, Any]) -> Array:
        operands = [self.tensor(number, shape) for number, shape in problem["operands"]]
        return np.asarray(_SOLVERS[problem["kind"]](problem, *operands))

    def tensor(self, number: int, shape: Sequence[int]) -> Array:
        """What an instruction gives at each position of a shape."""
        key = (number, tuple(shape))
        if key not in self._known:
            name, *operands = self.code[number]
            self._known[key] = np.broadcast_to(getattr(self, f"_do_{name}")(key[1], *operands), shape)
        return self._known[key]

    def _do_const(self, shape: Shape, value: Any, register: str) -> Array:
        return np.asarray(value, register)

    def _do_slot(self, shape: Shape, number: int) -> Array:
        return self.memory[number]

    def _do_iota(self, shape: Shape, place: Any, register: str) -> Array:
        return _positions(place).astype(register)

    def _do_load(self, shape: Shape, memory: int, place: Any, index: int | None, stride: int, register: str) -> Array:
        where, flat = _positions(place), self.result if memory < 0 else self.memory[memory]
        if index is not None:
            where = where + self.tensor(index, shape).astype(np.int64) * stride
        inside = flat.take(where, mode="clip") if flat.size else np.zeros(where.shape)  # nobody looks at what is not
        return inside.astype(register)

    def _do_call(self, shape: Shape, function: str, args: Sequence[int], register: str) -> Array:
        values = [self.tensor(arg, shape) for arg in args]
        result = np.asarray(values[0] if function == "cast" else FUNCTIONS[function].numpy(*values))
        if result.dtype.kind == "f" and np.dtype(register).kind in "iu":
            result = np.trunc(np.nan_to_num(result, posinf=0, neginf=0)).astype(np.int64)
        return result.astype(register)

    def _do_checked(
        self, shape: Shape, index: int, element: int, elements: int, extent: int, otherwise: int, check: int
    ) -> Array:
        given, place = self.tensor(index, shape), self.tensor(element, shape)
        inside = (given >= 0) & (given < extent)
        wrong = ~inside & (place >= 0) & (place < elements)
        if wrong.any() and not self.faults[:4].any():
            self.faults[:8].view(np.int32)[:] = check, place[wrong][0]
            self.faults[8:16].view(np.int64)[0] = given[wrong][0]
        return np.where(inside, given, otherwise)

    def _do_reduce(self, shape: Shape, combination: Any, args: Any, extent: int, item: int, register: str) -> Array:
        """Halves of each row are combined until one element is left."""
        state = [self.tensor(arg, (*shape[:-1], extent)) for arg in args]
        if not extent:
            return np.full((*shape[:-1], 1), combination["identity"][item], register)
        while state[0].shape[-1] > 1:
            half = state[0].shape[-1] // 2
            halves = [numbers[..., start : start + half] for start in (0, half) for numbers in state]
            both = _over_slots(combination, halves)
            state = [np.concatenate([b, s[..., 2 * half :]], -1) for b, s in zip(both, state, strict=True)]
        return state[item].astype(register)


def _over_slots(code: Mapping[str, Any], slots: Sequence[Array]) -> list[Array]:
    """Expressions over slots, at every position of these."""
    machine = _Machine(code["code"], slots, np.empty(0))
    return [machine.tensor(value, slots[0].shape) for value in code["values"]]


def _taps(problem: Any, image: Array, padding: Sequence[int], beyond: Any) -> Iterator[Array]:
    """What each tap of the windows reads for each result [N, C, H, W], row by row; `beyond` is what lies around."""
    steps = zip(*(problem["windows"][n] for n in ("kernel", "stride", "dilation")), problem["shape"][2:], strict=True)
    spans = [[slice(t * d, t * d + (n - 1) * s + 1, s) for t in range(k)] for k, s, d, n in steps]
    sizes = [max(s[-1].stop, n + 2 * p) for s, n, p in zip(spans, image.shape[2:], padding, strict=True)]
    padded = np.full((*image.shape[:2], *sizes), beyond, image.dtype)
    (top, left), (height, width) = padding, image.shape[2:]
    padded[:, :, top : top + height, left : left + width] = image
    return (padded[:, :, lines, columns] for lines in spans[0] for columns in spans[1])


def _convolution(problem: Any, image: Array, weight: Array) -> Array:
    groups, result = problem["groups"], np.zeros(problem["shape"])
    for tap, part in enumerate(_taps(problem, image, problem["windows"]["padding"], 0)):
        inputs = part.reshape(part.shape[0], groups, -1, *part.shape[2:])
        filters = weight.reshape(groups, -1, *weight.shape[1:2], prod(weight.shape[2:]))[..., tap]
        result += np.einsum("ngihw,goi->ngohw", inputs, filters).reshape(result.shape)
    return result


def _pooling(problem: Any, image: Array) -> Any:
    if problem["adaptive"]:
        return _adaptive(image, problem["shape"], np.max if problem["maximum"] else np.mean)
    divisor, padding = problem["divisor"], problem["windows"]["padding"]
    if problem["maximum"]:
        return np.maximum.reduce([*_taps(problem, image, padding, -np.inf)])
    total = sum(_taps(problem, image, padding, 0))
    if divisor == "ONE":
        return total
    around = padding if divisor == "PADDED" else (0, 0)  # counts like the image
    counted = np.ones([n + 2 * p for n, p in zip(image.shape, (0, 0, *around), strict=True)])
    return total / sum(_taps(problem, counted, [p - a for p, a in zip(padding, around, strict=True)], 0))


def _adaptive(image: Array, shape: Shape, reduce: Any) -> Array:
    result, (height, width) = np.empty(shape), image.shape[2:]
    for y, x in np.ndindex(*shape[2:]):
        lines = slice(y * height // shape[2], ceil_div((y + 1) * height, shape[2]))
        columns = slice(x * width // shape[3], ceil_div((x + 1) * width, shape[3]))
        result[:, :, y, x] = reduce(image[:, :, lines, columns], (2, 3))
    return result


def _attention(problem: Any, query: Array, key: Array, value: Array, *further: Array) -> Any:
    sinks = further[-1].reshape(-1, 1, 1) if problem["has_sinks"] else None
    mask = next(iter(further[:-1] if problem["has_sinks"] else further), None)
    key, value = (each.repeat(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.swapaxes(2, 3) * problem["scale"]
    scores = np.tanh(scores / problem["cap"]) * problem["cap"] if problem["cap"] else scores
    if mask is not None:
        mask = np.tile(mask, (len(scores) // max(1, len(mask)), 1, 1, 1))  # those of the first ones, again and again
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if problem["causal"]:
        scores = np.where(np.tri(*scores.shape[2:]) == 1, scores, -np.inf)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.where(np.isfinite(highest), np.exp(sinks - np.where(np.isfinite(highest), highest, 0)), 0)
    return weights / np.maximum(total, 1e-300) @ value  # zeros, where all is masked


def _scan(problem: Any, source: Array) -> Any:
    """At each step every state takes in that of the elements ahead, of which it tells twice as many as before."""
    positions = np.broadcast_to(np.arange(source.shape[1])[:, None], source.shape)
    state, distance = _over_slots(problem["lift"], [source, positions]), 1
    while distance < source.shape[1]:
        ahead, own = ([s[:, part] for s in state] for part in (slice(-distance), slice(distance, None)))
        both = _over_slots(problem["combination"], [*ahead, *own])
        state = [np.concatenate([s[:, :distance], b], 1) for s, b in zip(state, both, strict=True)]
        distance *= 2
    return _over_slots(problem["value"], state)[0]


def _sort(problem: Any, source: Array) -> Any:
    """The places of equal elements stay in order, for whose sake the elements become dense ranks, NaN the highest."""
    ranks = np.unique(source, return_inverse=True)[1].reshape(source.shape)
    return np.argsort(-ranks if problem["descending"] else ranks, -1, kind="stable")[..., : problem["shape"][-1]]


_SOLVERS: Mapping[str, Any] = {
    "Product": lambda problem, a, b: a @ b,
    "Convolution": _convolution,
    "Pooling": _pooling,
    "Attention": _attention,
    "Scan": _scan,
    "Sort": _sort,
}
