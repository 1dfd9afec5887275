"""How compiling grows with the length of a model: chains of 10 to 10,000 ops of each kind, on one processor core.

``python -m benchmarks.compile_time --out benchmarks/results/compile_time.json`` writes what docs/benchmarks.md shows.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import npu_compiler

__all__ = ["CHAINS", "LENGTHS", "Chain", "chain", "compile_seconds", "partition_seconds"]

LENGTHS = (10, 100, 1000, 10000)
TARGETS = ("metal", "cuda")
_ROWS, _COLUMNS = 4, 16

Tensor = Mapping[str, Any]


class Chain:
    """Writes an IR node by node."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self._name = name
        self._input = self._tensor("x", shape)
        self._weights: list[Tensor] = []
        self._nodes: list[dict[str, Any]] = []

    @property
    def input(self) -> Tensor:
        """What the model is given."""
        return self._input

    @property
    def length(self) -> int:
        """Nodes so far."""
        return len(self._nodes)

    def weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """Declares a weight."""
        self._weights.append(self._tensor(name, shape))
        return self._weights[-1]

    def add(
        self, op: str, inputs: Sequence[Tensor], sizes: Sequence[int], kind: str = "float32", **attrs: Any
    ) -> Tensor:
        """Adds a node and gives its result, of shape `sizes` and data type `kind`."""
        name = f"n{len(self._nodes)}"
        result = self._tensor(name, sizes, kind)
        node = {"name": name, "op_type": op, "inputs": list(inputs), "outputs": [result], "attrs": attrs}
        self._nodes.append(node)
        return result

    def ir(self, *outputs: Tensor) -> dict[str, Any]:
        """The model that gives `outputs`."""
        return {
            "model_name": self._name,
            "graph_inputs": [self._input],
            "graph_outputs": list(outputs),
            "weights": self._weights,
            "weight_name_mapping": {weight["name"]: weight["name"] for weight in self._weights},
            "nodes": self._nodes,
        }

    @staticmethod
    def _tensor(name: str, shape: Sequence[int], kind: str = "float32") -> Tensor:
        return {"name": name, "shape": list(shape), "dtype": kind}


Step = Callable[[Chain, Tensor], Tensor]
"""Adds the next few nodes behind a tensor."""


def _add_number(c: Chain, x: Tensor) -> Tensor:
    return c.add("aten.add.Scalar", [x], x["shape"], other=0.5)


def _activate_twice(c: Chain, x: Tensor) -> Tensor:
    return c.add("aten.relu.default", [c.add("aten.silu.default", [x], x["shape"])], x["shape"])


def _add_own_activation(c: Chain, x: Tensor) -> Tensor:
    return c.add("aten.add.Tensor", [x, c.add("aten.silu.default", [x], x["shape"])], x["shape"])


def _add_weight(c: Chain, x: Tensor) -> Tensor:
    return c.add("aten.add.Tensor", [x, c.weight(f"w{c.length}", x["shape"])], x["shape"])


def _view(c: Chain, x: Tensor) -> Tensor:
    rows, columns = x["shape"]
    turned = c.add("aten.transpose.int", [x], [columns, rows], dim0=0, dim1=1)
    return c.add("aten.reshape.default", [turned], [rows, columns], shape=[rows, columns])


def _turn_and_add(c: Chain, x: Tensor) -> Tensor:
    rows, columns = x["shape"]
    return _add_number(c, c.add("aten.transpose.int", [x], [columns, rows], dim0=0, dim1=1))


def _softmax(c: Chain, x: Tensor) -> Tensor:
    return c.add("aten.softmax.int", [x], x["shape"], dim=-1)


def _centre(c: Chain, x: Tensor) -> Tensor:
    mean = c.add("aten.mean.dim", [x], [*x["shape"][:-1], 1], dim=[-1], keepdim=True)
    return c.add("aten.sub.Tensor", [x, mean], x["shape"])


def _project(c: Chain, x: Tensor) -> Tensor:
    weight = c.weight(f"w{c.length}", (_COLUMNS, _COLUMNS))
    return c.add("aten.linear.default", [x, weight], x["shape"])


def _convolve(c: Chain, x: Tensor) -> Tensor:
    weight = c.weight(f"w{c.length}", (8, 8, 3, 3))
    attrs: dict[str, Any] = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    convolved = c.add("aten.conv2d.default", [x, weight], x["shape"], bias=None, **attrs)
    return c.add("aten.relu.default", [convolved], x["shape"])


def _join_and_cut(c: Chain, x: Tensor) -> Tensor:
    rows, columns = x["shape"]
    joined = c.add("aten.cat.default", [x, x], [2 * rows, columns], dim=0)
    return c.add("aten.slice.Tensor", [joined], [rows, columns], dim=0, start=rows // 2, end=rows // 2 + rows, step=1)


def _choose(c: Chain, x: Tensor) -> Tensor:
    condition = c.add("aten.gt.Scalar", [x], x["shape"], "bool", other=0.0)
    other = c.add("aten.neg.default", [x], x["shape"])
    return c.add("aten.where.self", [condition, x, other], x["shape"])


def _scale_foreign(c: Chain, x: Tensor) -> Tensor:
    return c.add("aten.erfinv.default", [_activate_twice(c, x)], x["shape"])


CHAINS: Mapping[str, tuple[Sequence[int], Step]] = {
    "x + 0.5": ((_ROWS, _COLUMNS), _add_number),
    "relu(silu(x))": ((_ROWS, _COLUMNS), _activate_twice),
    "x + silu(x)": ((_ROWS, _COLUMNS), _add_own_activation),
    "x + w": ((_ROWS, _COLUMNS), _add_weight),
    "transpose, reshape": ((_ROWS, _COLUMNS), _view),
    "x.T + 0.5": ((_ROWS, _COLUMNS), _turn_and_add),
    "softmax(x)": ((_ROWS, _COLUMNS), _softmax),
    "x - mean(x)": ((_ROWS, _COLUMNS), _centre),
    "linear": ((_ROWS, _COLUMNS), _project),
    "relu(conv2d(x))": ((1, 8, 4, 4), _convolve),
    "cat(x, x)[2:6]": ((_ROWS, _COLUMNS), _join_and_cut),
    "where(x > 0, x, -x)": ((_ROWS, _COLUMNS), _choose),
}
"""Shape of the input and what is repeated, by what it computes."""


def chain(name: str, length: int) -> dict[str, Any]:
    """A chain of `length` ops or up to two more."""
    shape, step = CHAINS[name]
    return _repeated(name, shape, step, length)


def alternating(length: int) -> dict[str, Any]:
    """A chain of `length` ops of which the device lacks every third."""
    return _repeated("erfinv(relu(silu(x)))", (_ROWS, _COLUMNS), _scale_foreign, length)


def _repeated(name: str, shape: Sequence[int], step: Step, length: int) -> dict[str, Any]:
    c = Chain(name, shape)
    x = c.input
    while c.length < length:
        x = step(c, x)
    return c.ir(x)


def compile_seconds(ir: Mapping[str, Any], target: str) -> float:
    """From the text of an IR to the bytes of an artifact."""
    text = json.dumps(ir)
    begin = time.process_time()
    npu_compiler.compile(json.loads(text), target=target).to_bytes()
    return time.process_time() - begin


def partition_seconds(ir: Mapping[str, Any]) -> float:
    """From the text of an IR to its plan, of which each part for the device is compiled when it is loaded."""
    text = json.dumps(ir)
    begin = time.process_time()
    npu_compiler.partition(json.loads(text))
    return time.process_time() - begin


def measure(lengths: Sequence[int]) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Of each chain, seconds by target and by length."""
    yield "partition", {"metal": {str(length): partition_seconds(alternating(length)) for length in lengths}}
    for name in CHAINS:
        yield (
            name,
            {
                target: {str(length): compile_seconds(chain(name, length), target) for length in lengths}
                for target in TARGETS
            },
        )


def machine() -> dict[str, Any]:
    """What it was measured on."""
    processor = (
        next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            platform.processor(),
        )
        if Path("/proc/cpuinfo").exists()
        else platform.processor()
    )
    return {"processor": processor, "python": platform.python_version(), "date": date.today().isoformat()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments = parser.parse_args()
    chains: dict[str, Any] = {}
    for name, seconds in measure(arguments.lengths):
        print(name, seconds, file=sys.stderr)
        chains[name] = seconds
        result = {"machine": machine(), "chains": chains}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
