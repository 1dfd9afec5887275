"""The toy target: a kernel is a list of instructions for a machine that works on whole tensors, as JSON.

An instruction says what to do, then the numbers of earlier instructions and what else it takes. `toy_runtime`, the
device's half, runs them by numpy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from npu_compiler import target_api as api
from npu_compiler.dtypes import ALL, BFLOAT16, FLOAT16, FLOAT64, DType

__all__ = ["ToyTarget"]

_ATTRIBUTES: dict[type[api.Problem], tuple[str, ...]] = {
    api.Product: (),
    api.Convolution: ("windows", "groups"),
    api.Pooling: ("windows", "maximum", "adaptive", "divisor"),
    api.Attention: ("scale", "causal", "cap", "has_sinks"),
    api.Scan: (),
    api.Sort: ("descending",),
}


class ToyTarget(api.CodegenTarget):
    """Dense tensors; a kernel may compute what a problem reads, and what follows it."""

    name = "toy"
    compute_dtypes = (FLOAT16.name, BFLOAT16.name)
    storage_dtypes = frozenset(dtype.name for dtype in ALL if dtype != FLOAT64)

    def layout(self, shape: tuple[int, ...], role: str) -> api.Layout:
        return api.dense(shape)

    def loads(self, group: api.Group, position: int, operand: api.Operand) -> bool:
        return isinstance(operand, api.Computed | api.Added)

    def lower(self, group: api.Group, lowering: api.Lowering) -> list[api.Step]:
        kernel = _Kernel(group)
        number = lowering.kernel(api.KernelSource("toy", json.dumps(kernel.text(), default=_plain)))
        flops = api.flops_of([group.expr], prod(group.shape)) + sum(problem.flops for problem in kernel.problems)
        nbytes, one = api.traffic_of(group, lowering.tensors), (1, 1, 1)
        return [api.KernelCall(" + ".join(group.nodes), number, kernel.arguments(), b"", one, one, flops, nbytes)]


class _Kernel:
    """The instructions that compute a group, and what they bind: the output, each tensor read, the record of faults."""

    def __init__(self, group: api.Group) -> None:
        self.group, self.code = group, _Code(self)
        self.bound: dict[int, DType] = {group.output.index: group.output.dtype}
        self.checks = False
        added = () if group.added is None else (group.added.problem,)
        self.problems = () if group.problem is None else (group.problem, *added)

    def text(self) -> dict[str, Any]:
        group, code = self.group, self.code
        text: dict[str, Any] = {"problems": [self._problem(problem) for problem in self.problems]}
        if group.anchor is not None:
            text["result"] = [group.anchor.layout.size, group.anchor.view]
        text |= {"shape": group.shape, "place": group.view, "value": code.number(group.expr)}
        if group.index is not None:
            text |= {"index": code.number(group.index), "index_stride": group.index_stride}
        return text | {"code": code.lines, "memory": [dtype.name for dtype in self.bound.values()]}

    def arguments(self) -> tuple[api.Argument, ...]:
        tensors = [api.Argument(index, writes=index == self.group.output.index) for index in self.bound]
        return (*tensors, api.Argument(api.FAULTS, writes=True)) if self.checks else tuple(tensors)

    def memory(self, index: int, dtype: DType) -> int:
        """The number of what is bound for a tensor; -1 for the problem's own result, which is in no memory."""
        if self.group.anchor is not None and index == self.group.anchor.index:
            return -1
        self.bound.setdefault(index, dtype)
        return list(self.bound).index(index)

    def _problem(self, problem: api.Problem) -> dict[str, Any]:
        operands = [(self.code.number(_element(operand)), operand.shape) for operand in problem.operands]
        if type(problem) not in _ATTRIBUTES:
            raise api.OpRefusal(f"the target '{ToyTarget.name}' has no kernel for {type(problem).__name__}")
        attributes = {name: getattr(problem, name) for name in _ATTRIBUTES[type(problem)]}
        if isinstance(problem, api.Scan):
            attributes |= {"combination": _combination(problem.combination), "lift": _over_slots(problem.lift)}
            attributes["value"] = _over_slots((problem.value,))
        return {"kind": type(problem).__name__, "operands": operands, "shape": problem.shape, **attributes}


def _plain(value: Any) -> Any:
    """What JSON has no word for: views, windows, and what a mean divides by."""
    return value.name if isinstance(value, api.Divisor) else asdict(value)


def _element(operand: api.Operand) -> api.Expr:
    """An element of an operand, however the problem gets it."""
    return operand.expr if isinstance(operand, api.Computed) else api.Load(operand.ref, operand.dtype)


class _Code:
    """Instructions for expressions; equal expressions have one."""

    def __init__(self, kernel: _Kernel | None = None) -> None:
        self.kernel, self.lines = kernel, list[list[Any]]()
        self._numbers: dict[api.Expr, int] = {}

    def number(self, expr: api.Expr) -> int:
        """The number of the instruction that computes an expression."""
        for node in api.walk(expr):
            if node not in self._numbers:
                self.lines.append(self._instruction(node))
                self._numbers[node] = len(self.lines) - 1
        return self._numbers[expr]

    def _instruction(self, node: api.Expr) -> list[Any]:
        known, register = self._numbers, "float64" if node.dtype.is_float else node.dtype.name
        match node:
            case api.Const():
                return ["const", node.value, register]
            case api.Slot():
                return ["slot", node.number]
            case api.Iota():
                return ["iota", node.view, register]
            case api.Call():
                return ["call", node.fn, [known[arg] for arg in node.args], register]
            case api.Reduce():
                state = [known[arg] for arg in node.args]
                return ["reduce", _combination(node.combination), state, node.extent, node.item, register]
        assert self.kernel is not None  # what states are combined by reads no memory
        if isinstance(node, api.Checked):
            self.kernel.checks = True
            limits = (node.elements, node.extent, node.otherwise, node.check + 1)
            return ["checked", known[node.index], known[node.element], *limits]
        further = None if node.index is None else known[node.index]
        memory = self.kernel.memory(node.ref.tensor, node.dtype)
        return ["load", memory, node.ref.view, further, node.index_stride, register]


def _combination(combination: api.Combination) -> dict[str, Any]:
    return {**_over_slots(combination.values), "identity": [const.value for const in combination.identity]}


def _over_slots(exprs: Sequence[api.Expr]) -> dict[str, Any]:
    code = _Code()
    return {"values": [code.number(expr) for expr in exprs], "code": code.lines}
