"""A step of attention over a cache of keys and values in codes, which it updates: for the tests of every target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.frontend.cache_forms import RowForm, row_form
from npu_runtime import Device, Executor, NPUBuffer

__all__ = ["CodedStep", "Sizes", "check_step", "error_of_results", "error_of_step", "host_numbers", "neighbours"]


@dataclass(frozen=True)
class Sizes:
    """Of a step: queries and new keys of `rows` tokens, a cache of `length` positions."""

    length: int
    size: int = 64
    groups: int = 2
    shared: int = 3
    rows: int = 1


class CodedStep(torch.nn.Module):
    """Keys are turned, rounded and written, like values; then queries, turned alike, meet the cache.

    Attributes:
        form: What the cache holds.
    """

    def __init__(self, sizes: Sizes, kind: str, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.sizes, self.dtype = sizes, dtype
        self.form: RowForm = row_form(kind, dtype)
        self.eval()

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        turn: torch.Tensor,
        positions: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        form, each = self.form, self.form.tensors
        rows = (*form.pack(keys * turn), *form.pack(values))
        held = tuple(form.put(cache, positions, new) for cache, new in zip(caches, rows, strict=True))
        seen = torch.arange(self.sizes.length) <= positions[:, None]
        numbers = form.numbers(held[:each]), form.numbers(held[each:])
        return (F.scaled_dot_product_attention(queries * turn, *numbers, seen, enable_gqa=True), *held)

    def inputs(self, position: int) -> tuple[Any, ...]:
        """Seeded inputs of a step whose first token goes to a position."""
        sizes, generator = self.sizes, torch.Generator().manual_seed(position)

        def made(heads: int, rows: int) -> torch.Tensor:
            return torch.randn(1, heads, rows, sizes.size, generator=generator).to(self.dtype)

        queries = made(sizes.groups * sizes.shared, sizes.rows)
        new = made(sizes.groups, sizes.rows), made(sizes.groups, sizes.rows)
        turn = torch.randn(sizes.rows, sizes.size, generator=generator).to(self.dtype)
        caches = (*self.form.pack(made(sizes.groups, sizes.length)), *self.form.pack(made(sizes.groups, sizes.length)))
        return queries, *new, turn, position + torch.arange(sizes.rows), caches


def error_of_step(step: CodedStep, position: int, device: Device) -> float:
    """The root mean square error of a step on a device, against float64 over the cache as the step left it.

    What it wrote is compared with what PyTorch rounds: nothing but the new rows changes, and these by a code at most.
    """
    given = step.inputs(position)
    program = npu_compiler.compile(npu_compiler.extract(step, given).ir, device.target, _name(step.dtype))
    names = [spec.name for spec in program.input_specs]
    flat = [*given[:5], *given[5]]
    assert len(names) == len(flat)
    assert len(program.main.state) == len(given[5]), program.main.notes
    buffers = {
        spec.name: NPUBuffer.from_numpy(host_numbers(tensor), device, spec=spec)
        for spec, tensor in zip(program.input_specs, flat, strict=True)
    }
    caches = [np.array(buffers[spec.name].to_numpy(spec=spec)).astype(float) for spec in program.input_specs[5:]]
    outputs = Executor(program, device).run(inputs=buffers)
    result, *held = (np.asarray(outputs[spec.name].to_numpy(spec=spec)).astype(float) for spec in program.output_specs)
    return error_of_results(step, given, caches, result, held)


def error_of_results(
    step: CodedStep,
    given: tuple[Any, ...],
    caches: Sequence[NDArray[np.float64]],
    result: NDArray[np.float64],
    held: Sequence[NDArray[np.float64]],
) -> float:
    """The error of a step's result, given the cache ahead of it and behind it; see `error_of_step`."""
    position, (_, *expected) = int(given[4][0]), step(*given)
    for after, wanted, before in zip(held, expected, caches, strict=True):
        changed = np.unique(np.nonzero(after != before)[2])
        assert {*changed.tolist()} <= {*range(position, position + step.sizes.rows)}
        exact = wanted.double().numpy()
        assert (np.abs(after - exact) <= neighbours(exact, wanted.dtype, 2.0**-8)).all()
    parts = [torch.from_numpy(part) for part in held]
    if step.form.tensors == 2:
        parts = [parts[0] * parts[1], parts[2] * parts[3]]
    keys, values = parts
    queries, turn = given[0].double(), given[3].double()
    seen = torch.arange(step.sizes.length) <= given[4][:, None]
    wanted = F.scaled_dot_product_attention(queries * turn, keys, values, seen, enable_gqa=True)
    return float(np.sqrt(np.mean((result - wanted.numpy()) ** 2)))


def check_step(sizes: Sizes, kind: str, dtype: torch.dtype, positions: Sequence[int], device: Device) -> None:
    """A step over codes errs by no more than 1.2 times what the same step over 16 bits does."""
    coded = [error_of_step(CodedStep(sizes, kind, dtype), position, device) for position in positions]
    plain = [error_of_step(CodedStep(sizes, "16", dtype), position, device) for position in positions]
    assert sum(coded) <= 1.2 * sum(plain), (coded, plain)


def neighbours(numbers: NDArray[np.float64], dtype: torch.dtype, unit: float) -> NDArray[np.float64]:
    """How far the neighbours of numbers are at most, in a type of codes; of others, what two roundings, each by at most
    `unit` of a number, may make them differ by.
    """
    steps = {torch.int8: (0.0, 1.0), torch.float8_e4m3fn: (2.0**-3, 2.0**-9)}
    relative, least = steps.get(dtype, (2.01 * unit, 0.0))
    return np.maximum(relative * np.abs(numbers), least)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def host_numbers(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's numbers in numpy's type of the same name."""
    kind = getattr(ml_dtypes, _name(tensor.dtype), None)
    return tensor.numpy() if kind is None else tensor.float().numpy().astype(kind)
