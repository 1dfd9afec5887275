"""What tells which optional tensors of a node are absent: the model's own names, and a trial of the op's definition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.graph.tracing import results_of
from npu_compiler.ir import OpNode, TensorSpec
from npu_compiler.ops.binding import Evidence, TensorArgument
from npu_compiler.ops.registry import traits_of
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.layout import Layout, dense
from npu_compiler.tensor.symbolic import Trace

__all__ = ["Names", "evidence_of"]


class Names:
    """What a model calls its tensors: inputs and weights by their own names, views of them likewise."""

    def __init__(self, inputs: Iterable[str], weights: Mapping[str, str]) -> None:
        """Takes the names of the inputs, and of each weight the key by which the weight file has it."""
        self._words: dict[str, tuple[str, ...]] = {name: (name,) for name in inputs}
        self._words.update({name: (key, name) for name, key in weights.items()})

    def __getitem__(self, tensor: str) -> tuple[str, ...]:
        return self._words.get(tensor, ())

    def follow(self, op: str, tensors: Sequence[str], outputs: Sequence[str]) -> None:
        """A view, a copy or a conversion of a tensor goes by the tensor's name."""
        known = traits_of(op)
        passes = known.work is Work.VIEW or known.keeps_order
        if passes and len(outputs) == 1 and tensors and tensors[0] in self._words:
            self._words[outputs[0]] = self._words[tensors[0]]


def evidence_of(
    node: str,
    op: str,
    tensors: Sequence[str],
    attrs: Mapping[str, Any],
    outputs: Sequence[TensorSpec],
    specs: Mapping[str, TensorSpec],
    names: Names,
) -> Evidence:
    """What is known of the tensors that a node reads.

    Args:
        node, op: Its name and its op.
        tensors: Names of what it reads.
        attrs: Its attributes.
        outputs: What the IR declares as its results.
        specs: At least what it reads, by name.
        names: What the model calls its tensors.
    """

    def fits(places: Mapping[str, TensorArgument]) -> bool:
        inputs = {
            key: tensors[place] if isinstance(place, int) else tuple(tensors[i] for i in place if i is not None)
            for key, place in places.items()
        }
        given = {key: value for key, value in attrs.items() if not key.startswith("_tensor_")}
        return _computes(OpNode(node, op, inputs, given, tuple(o.name for o in outputs)), outputs, specs)

    return Evidence([names[tensor] for tensor in tensors], fits)


class _Dense:
    """Every tensor is row-major."""

    def layout(self, shape: tuple[int, ...], role: str) -> Layout:
        return dense(shape)


def _computes(node: OpNode, outputs: Sequence[TensorSpec], specs: Mapping[str, TensorSpec]) -> bool:
    """Whether the definition of the node's op takes these arguments and gives what is declared."""
    trace = Trace(_Dense())
    env = {name: trace.add(name, specs[name].shape, specs[name].dtype, "plain") for name in node.tensors()}
    try:
        results_of(node, env, trace, outputs)
    except (UnsupportedOpError, IRError):
        return False
    return True
