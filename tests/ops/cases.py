"""What a case of an op is: the ATen overload, its arguments, and what to expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.support.ir_builder import IRBuilder, Value, overload_of

__all__ = ["BOOL", "INT", "Case", "Operand", "booleans", "case", "floats", "integers", "refused", "values"]

MODEL = "model"  # dtype of an operand that has the model's own floating-point type
INT, BOOL = "int64", "bool"


@dataclass(frozen=True)
class Operand:
    """A tensor argument.

    Attributes:
        shape: Shape of the graph's input.
        dtype: ``model`` for the model's floating-point type, else a dtype's name.
        low, high: Range that values are drawn from, evenly; `high` is excluded.
        data: The values themselves, row-major, where the case depends on them.
        views: View ops, with their attributes, between the graph's input and the op.
    """

    shape: tuple[int, ...]
    dtype: str = MODEL
    low: float = -2.0
    high: float = 2.0
    data: tuple[float, ...] | None = None
    views: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def through(self, op: str, *attrs: Any) -> Operand:
        """The operand seen through one more view op."""
        return replace(self, views=(*self.views, (op, attrs)))

    def tensor(self, generator: torch.Generator, compute: torch.dtype) -> torch.Tensor:
        """Values for the graph's input; floating point is float64, rounded to `compute`."""
        if self.data is not None:
            drawn = torch.tensor(self.data, dtype=torch.float64).reshape(self.shape)
        else:
            drawn = torch.rand(self.shape, generator=generator, dtype=torch.float64) * (self.high - self.low) + self.low
        if self.dtype == MODEL:
            return drawn.to(compute).double()
        return drawn.floor().to(getattr(torch, self.dtype)) if self.dtype != BOOL else drawn > 0

    def __str__(self) -> str:
        kind = "" if self.dtype == MODEL else self.dtype
        steps = "".join(f".{op.split('.')[1]}" for op, _ in self.views)
        return f"{kind}[{','.join(map(str, self.shape))}]{steps}"


def floats(*shape: int, low: float = -2.0, high: float = 2.0) -> Operand:
    return Operand(shape, low=low, high=high)


def integers(*shape: int, low: float = -5, high: float = 6, dtype: str = INT) -> Operand:
    return Operand(shape, dtype, low, high)


def booleans(*shape: int) -> Operand:
    return Operand(shape, BOOL, -1, 1)


def values(*data: float, dtype: str = MODEL) -> Operand:
    """A vector of exactly these values."""
    return Operand((len(data),), dtype, data=data)


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
        op: ATen name with overload.
        args, kwargs: Its arguments; `Operand` for tensors.
        refusal: Words of the reason for which it is refused; empty where it must compute.
        stores: How often a value on the way to the result is stored in the compute dtype, the result included.
        targets: The targets that have a kernel for it, where not all have; the others must refuse it.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    stores: int = 1
    targets: tuple[str, ...] = ()

    def storing(self, stores: int) -> Case:
        return replace(self, stores=stores)

    def only_on(self, *targets: str) -> Case:
        return replace(self, targets=targets)

    def operands(self) -> Iterator[Operand]:
        """The tensor arguments in order, those in lists included."""
        for arg in (*self.args, *self.kwargs.values()):
            yield from (item for item in (arg if isinstance(arg, list) else [arg]) if isinstance(item, Operand))

    def ir(self, model: torch.dtype) -> dict[str, Any]:
        """IR of this call alone, in a model of the given dtype. Its inputs are ``x0``, ``x1``..."""
        builder = IRBuilder(self.op)
        made: list[Value] = []

        def argument(value: Any) -> Any:
            if isinstance(value, list):
                return [argument(item) for item in value]
            if not isinstance(value, Operand):
                return value
            dtype = model if value.dtype == MODEL else getattr(torch, value.dtype)
            result = builder.input(f"x{len(made)}", value.shape, dtype)
            made.append(result)
            for op, attrs in value.views:
                result = builder.call(op, result, *attrs)
            return result

        args = [argument(arg) for arg in self.args]
        kwargs = {key: argument(value) for key, value in self.kwargs.items()}
        return builder.build(*builder.call_all(self.op, *args, name="node", **kwargs))

    def expected(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What torch computes in float64 from the values of the inputs."""
        rest = iter(tensors)

        def argument(value: Any) -> Any:
            if isinstance(value, list):
                return [argument(item) for item in value]
            if value in (torch.float32, torch.float16, torch.bfloat16):
                return torch.float64
            if not isinstance(value, Operand):
                return value
            tensor = next(rest).clone()
            for op, attrs in value.views:
                tensor = overload_of(op)(tensor, *attrs)
            return tensor

        result = overload_of(self.op)(
            *(argument(arg) for arg in self.args), **{key: argument(value) for key, value in self.kwargs.items()}
        )
        return [result] if isinstance(result, torch.Tensor) else list(result or ())

    def __str__(self) -> str:
        parts = [_text(arg) for arg in self.args] + [f"{key}={_text(value)}" for key, value in self.kwargs.items()]
        return f"{self.op.removeprefix('aten.')}({' '.join(parts)})"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"<{','.join(map(_text, value))}>"
    return str(value).removeprefix("torch.")


def case(op: str, *args: Any, **kwargs: Any) -> Case:
    """A call that must give what torch gives."""
    return Case(f"aten.{op}", args, kwargs)


def refused(reason: str, op: str, *args: Any, **kwargs: Any) -> Case:
    """A call that must be refused for a reason that says `reason`."""
    return Case(f"aten.{op}", args, kwargs, refusal=reason)
