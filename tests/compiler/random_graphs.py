"""Random models: the same calls recorded as IR and done by torch, in place and through views included."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.ir_builder import IRBuilder, Value, overload_of

__all__ = ["Pair", "RandomModel"]

Draw = Callable[[st.SearchStrategy[Any]], Any]
_SIZES = st.sampled_from([1, 2, 3, 4, 6])
_MOST_ELEMENTS = 4000


class Pair(NamedTuple):
    """A tensor in the IR and in torch."""

    value: Value
    tensor: torch.Tensor

    def __repr__(self) -> str:
        return f"{self.value.name}{list(self.tensor.shape)}"


class RandomModel:
    """A model that grows by calls whose operands and attributes are drawn.

    Attributes:
        builder: The IR so far.
        inputs, weights: Tensors by name, float64 or int64, as they were before anything changed them in place.
        values: Every floating-point tensor so far, in the IR and in torch.
        calls: The calls in words.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.builder = IRBuilder()
        self.inputs: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.values: list[Pair] = []
        self.calls: list[str] = []
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def add_input(self) -> None:
        shape = tuple(self.draw(st.lists(_SIZES, min_size=1, max_size=4)))
        self._input(shape, self._random(shape))

    def step(self) -> None:
        """Adds a call that fits one of the values."""
        value, tensor = self._any()
        kinds = [self._unary, self._binary, self._view, self._slice, self._reduce, self._normalize, self._join]
        kinds += [self._split, self._choose, self._in_place]
        kinds += [self._linear, self._gather] if tensor.dim() >= 2 else []
        kinds += [self._image, self._convolve] if tensor.dim() == 4 else []
        if tensor.numel() <= _MOST_ELEMENTS:
            self.draw(st.sampled_from(kinds))(value, tensor)

    def outputs(self) -> list[Pair]:
        count = self.draw(st.integers(1, min(3, len(self.values))))
        latest = self.values[-1]
        chosen = [latest, *(self._any() for _ in range(count - 1))]
        return list({pair.value.name: pair for pair in chosen}.values())

    # ---- operands

    def _any(self) -> Pair:
        found: Pair = self.draw(st.sampled_from(self.values))
        return found

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _input(self, shape: tuple[int, ...], tensor: torch.Tensor) -> Pair:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        value = self.builder.input(f"x{len(self.inputs)}", shape, dtype)
        self.inputs[value.name] = tensor.clone()
        if tensor.is_floating_point():
            self.values.append(Pair(value, tensor))
        return Pair(value, tensor)

    def _weight(self, *shape: int) -> Pair:
        key = f"w{len(self.weights)}"
        self.weights[key] = self._random(shape)
        return Pair(self.builder.weight(key, shape), self.weights[key].clone())

    def _call(self, op: str, *args: Any, **kwargs: Any) -> None:
        """Records the call and does it; an argument is a pair of both worlds, a list of pairs, or an attribute."""

        def side(value: Any, index: int) -> Any:
            if isinstance(value, Pair):
                return value[index]
            return [side(item, index) for item in value] if isinstance(value, list) else value

        made = self.builder.call_all(op, *(side(arg, 0) for arg in args), **kwargs)
        result = overload_of(op)(*(side(arg, 1) for arg in args), **kwargs)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        pairs = [Pair(*pair) for pair in zip(made, results, strict=True)]
        self.values += pairs
        self.calls.append(f"{pairs} = {op}({args} {kwargs})")

    def _dim(self, tensor: torch.Tensor) -> int:
        return int(self.draw(st.integers(-tensor.dim(), tensor.dim() - 1))) if tensor.dim() else 0

    # ---- calls

    def _unary(self, value: Value, tensor: torch.Tensor) -> None:
        op = self.draw(st.sampled_from(["relu", "neg", "tanh", "sigmoid", "silu", "abs"]))
        self._call(f"aten.{op}.default", Pair(value, tensor))

    def _binary(self, value: Value, tensor: torch.Tensor) -> None:
        partners = [pair for pair in self.values if _broadcasts(pair[1], tensor)]
        op = self.draw(st.sampled_from(["add", "sub", "mul"]))
        scalar = self.draw(st.booleans())
        other = 0.5 if scalar else self.draw(st.sampled_from(partners))
        self._call(f"aten.{op}.{'Scalar' if scalar else 'Tensor'}", Pair(value, tensor), other)

    def _choose(self, value: Value, tensor: torch.Tensor) -> None:
        condition = self.builder.call("aten.gt.Scalar", value, 0.0)
        other = self.draw(st.sampled_from([pair for pair in self.values if _broadcasts(pair[1], tensor)]))
        self._call("aten.where.self", Pair(condition, tensor > 0), Pair(value, tensor), other)

    def _view(self, value: Value, tensor: torch.Tensor) -> None:
        pair, shape, rank = Pair(value, tensor), list(tensor.shape), tensor.dim()
        kind = self.draw(st.sampled_from(["permute", "reshape", "unsqueeze", "squeeze", "expand", "contiguous"]))
        if kind == "permute":
            self._call("aten.permute.default", pair, self.draw(st.permutations(range(rank))))
        elif kind == "reshape":
            self._call("aten.reshape.default", pair, self._other_shape(tensor.numel()))
        elif kind == "unsqueeze" and rank < 5:
            self._call("aten.unsqueeze.default", pair, self.draw(st.integers(0, rank)))
        elif kind == "squeeze":
            self._call("aten.squeeze.default", pair)
        elif kind == "expand" and rank < 5:
            lead = self.draw(st.sampled_from([[], [2]]))
            sizes = [3 if n == 1 and self.draw(st.booleans()) else n for n in shape]
            self._call("aten.expand.default", pair, [*lead, *sizes])
        elif kind == "contiguous":
            self._call("aten.contiguous.default", pair)

    def _other_shape(self, count: int) -> list[int]:
        shape: list[int] = []
        while count > 1 and len(shape) < 3:
            divisors = [d for d in range(1, count + 1) if count % d == 0]
            shape.append(self.draw(st.sampled_from(divisors)))
            count //= shape[-1]
        return [*shape, count]

    def _slice(self, value: Value, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0:
            return
        dim = self._dim(tensor)
        size = tensor.shape[dim]
        start = self.draw(st.integers(0, size - 1))
        if self.draw(st.booleans()):
            self._call("aten.select.int", Pair(value, tensor), dim, start)
        else:
            end, step = self.draw(st.integers(start + 1, size)), self.draw(st.integers(1, 2))
            self._call("aten.slice.Tensor", Pair(value, tensor), dim, start, end, step)

    def _reduce(self, value: Value, tensor: torch.Tensor) -> None:
        op = self.draw(st.sampled_from(["aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default"]))
        dims = self.draw(st.sets(st.integers(0, max(0, tensor.dim() - 1)), min_size=1)) if tensor.dim() else []
        self._call(op, Pair(value, tensor), sorted(dims), self.draw(st.booleans()))

    def _normalize(self, value: Value, tensor: torch.Tensor) -> None:
        if tensor.dim() and self.draw(st.booleans()):
            size = tensor.shape[-1]
            self._call("aten.layer_norm.default", Pair(value, tensor), [size], self._weight(size), self._weight(size))
        else:
            self._call("aten.softmax.int", Pair(value, tensor), self._dim(tensor))

    def _join(self, value: Value, tensor: torch.Tensor) -> None:
        same = [pair for pair in self.values if pair[1].shape == tensor.shape]
        if tensor.dim() == 0 or tensor.dim() > 4:
            return
        parts = [Pair(value, tensor), *self.draw(st.lists(st.sampled_from(same), min_size=1, max_size=2))]
        self._call(self.draw(st.sampled_from(["aten.cat.default", "aten.stack.default"])), parts, self._dim(tensor))

    def _split(self, value: Value, tensor: torch.Tensor) -> None:
        if tensor.dim():
            self._call("aten.split.Tensor", Pair(value, tensor), self.draw(st.integers(1, 3)), self._dim(tensor))

    def _in_place(self, value: Value, tensor: torch.Tensor) -> None:
        if value.producer is None or _overlaps(tensor):
            return
        if self.draw(st.booleans()):
            self._call("aten.relu_.default", Pair(value, tensor))
        else:
            self._call("aten.mul_.Scalar", Pair(value, tensor), 2.0)

    def _linear(self, value: Value, tensor: torch.Tensor) -> None:
        width = self.draw(_SIZES)
        bias = [self._weight(width)] if self.draw(st.booleans()) else []
        self._call("aten.linear.default", Pair(value, tensor), self._weight(width, tensor.shape[-1]), *bias)

    def _gather(self, value: Value, tensor: torch.Tensor) -> None:
        dim = self._dim(tensor)
        index = torch.randint(0, tensor.shape[dim], (self.draw(_SIZES),), generator=self.generator)
        self._call("aten.index_select.default", Pair(value, tensor), dim, self._input(tuple(index.shape), index))

    def _convolve(self, value: Value, tensor: torch.Tensor) -> None:
        outputs = self.draw(st.sampled_from([1, 3, 6]))
        weight = self._weight(outputs, tensor.shape[1], 3, 3)
        bias = self._weight(outputs) if self.draw(st.booleans()) else None
        self._call("aten.conv2d.default", Pair(value, tensor), weight, bias, [1, 1], [1, 1])
        if self.draw(st.booleans()):
            statistics = [self._weight(outputs) for _ in range(4)]
            self.weights[f"w{len(self.weights) - 1}"].abs_().add_(0.5)
            statistics[3] = Pair(statistics[3].value, self.weights[f"w{len(self.weights) - 1}"].clone())
            self._call("aten.batch_norm.default", self.values[-1], *statistics, False, 0.1, 1e-5, True)

    def _image(self, value: Value, tensor: torch.Tensor) -> None:
        if min(tensor.shape[2:]) >= 2 and self.draw(st.booleans()):
            self._call("aten.max_pool2d.default", Pair(value, tensor), [2, 2])
        else:
            self._call("aten.adaptive_avg_pool2d.default", Pair(value, tensor), [1, 1])


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return prod(np.broadcast_shapes(a.shape, b.shape)) <= _MOST_ELEMENTS
    except ValueError:
        return False


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory, so that torch refuses to change the tensor in place."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
