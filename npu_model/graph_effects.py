"""What a graph of PyTorch does beside computing: what it writes, whose memory it returns, whether it draws numbers.

A program on a device has no memory in common with its caller. So a result that is an input, or a view of one, is made
of that input when the graph has run, and results that share memory get memory that they share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from npu_compiler.errors import ExtractionError
from npu_runtime.host_tensors import as_array

__all__ = ["Effects", "find_effects", "overlap"]


@dataclass(frozen=True)
class _View:
    """Where a result lies in memory that others see too. Strides and offset count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Constant:
    """A result that is no tensor."""

    value: object


@dataclass(frozen=True)
class _Computed:
    """A result that the device computes, the `place`-th of these.

    With a view it lies in memory of `elements` that other results see too: those of the same `group`.
    """

    place: int
    view: _View | None = None
    group: int = 0
    elements: int = 0


@dataclass(frozen=True)
class _OfInput:
    """A result that is an input, or, with a view, lies in its memory."""

    index: int
    view: _View | None
    detached: bool


_Result = _Constant | _Computed | _OfInput


@dataclass(frozen=True)
class Effects:
    """What a graph does when it is called with tensors of certain shapes.

    Attributes:
        written: Places of the inputs that it writes.
        uncounted: Whether PyTorch does not count up the version of one of them: running statistics of a BatchNorm.
        draws: Whether it draws random numbers.
        computed: Places, among all results, of those that have to be computed.
        kinds: Data type and device of each of these.
        differentiable: Whether each of these carries gradients.
    """

    written: tuple[int, ...]
    uncounted: bool
    draws: bool
    computed: tuple[int, ...]
    kinds: tuple[tuple[torch.dtype, torch.device], ...]
    differentiable: tuple[bool, ...]
    _results: tuple[_Result, ...]
    _spec: TreeSpec

    @property
    def shares(self) -> bool:
        """Whether results lie in memory that other results see, and that is no input's."""
        return any(isinstance(result, _Computed) and result.view is not None for result in self._results)

    def results(self, computed: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
        """What the graph returns.

        Args:
            computed: The results that were computed, in order.
            args: The inputs, written already.
        """
        groups: dict[int, torch.Tensor] = {}
        return tree_unflatten([_made(result, computed, args, groups) for result in self._results], self._spec)


def _made(result: _Result, computed: Sequence[torch.Tensor], args: Sequence[Any], groups: dict[int, Any]) -> Any:
    if isinstance(result, _Constant):
        return result.value
    if isinstance(result, _OfInput):
        source = args[result.index].detach() if result.detached else args[result.index]
        return source if result.view is None else result.view.of(source)
    value = computed[result.place]
    if result.view is None:
        return value
    if result.group not in groups:
        groups[result.group] = value.new_empty(result.elements)
    return result.view.of(groups[result.group]).copy_(value)


def find_effects(graph: torch.fx.GraphModule, args: Sequence[Any], differentiable: bool) -> Effects:
    """Runs a graph on tensors without data, to see what it does.

    Args:
        graph: What dynamo traced.
        args: What it is called with: tensors and numbers.
        differentiable: Whether gradients are wanted.

    Raises:
        ExtractionError: It cannot run without values, holds a transform of `torch.func`, or returns the same memory
            under several data types.
        InputError: It returns a tensor of a data type that no array has.
    """
    _check_untransformed(graph)
    watch = _Watch()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), torch.set_grad_enabled(differentiable), fake_mode:
        fakes = {i: _without_data(arg, differentiable) for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        before = {index: fake._version for index, fake in fakes.items()}
        try:
            with watch:
                leaves, spec = tree_flatten(graph(*(fakes.get(index, arg) for index, arg in enumerate(args))))
        except Exception as error:  # whatever an operator says that cannot run without values
            raise ExtractionError(f"its shapes depend on values: {type(error).__name__}: {error}") from error
        counted = {index for index, fake in fakes.items() if fake._version != before[index]}
        uncounted = {index for index, fake in fakes.items() if _memory(fake) in watch.statistics} - counted
        results = _sorted(leaves, fakes)
    computed = tuple(place for place, result in enumerate(results) if isinstance(result, _Computed))
    values = [leaves[place] for place in computed]
    for value in values:
        as_array(torch.empty(0, dtype=value.dtype), "a result")
    return Effects(
        written=tuple(sorted(counted | uncounted)),
        uncounted=bool(uncounted),
        draws=watch.draws,
        computed=computed,
        kinds=tuple((value.dtype, value.device) for value in values),
        differentiable=tuple(value.requires_grad for value in values),
        _results=results,
        _spec=spec,
    )


def overlap(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors may lie in the memory of another."""
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the first behind it."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _check_untransformed(graph: torch.fx.GraphModule) -> None:
    """Refuses transforms: they wrap tensors between begin and end, and to fail there leaves PyTorch wrapping."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    for node in (node for inner in graphs for node in inner.nodes):
        if str(getattr(node.target, "__module__", "")).startswith(("torch._functorch", "torch._C._functorch")):
            raise ExtractionError("it holds a transform of torch.func")


def _without_data(tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
    """A tensor like another one at the begin of memory of its own."""
    if tensor.layout is not torch.strided:
        raise ExtractionError(f"given a tensor of the layout {tensor.layout}, expected dense ones")
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(differentiable and tensor.requires_grad)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _sorted(leaves: Sequence[Any], fakes: Mapping[int, torch.Tensor]) -> tuple[_Result, ...]:
    """Says of each result where it comes from."""
    inputs = {_memory(fake): index for index, fake in reversed(list(fakes.items()))}
    owners = Counter(_memory(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    kinds: dict[int, torch.dtype] = {_memory(fake): fake.dtype for fake in fakes.values()}
    results: list[_Result] = []
    computed = 0
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            results.append(_Constant(leaf))
            continue
        memory = _memory(leaf)
        if kinds.setdefault(memory, leaf.dtype) is not leaf.dtype:
            raise ExtractionError(f"it returns the same memory as {kinds[memory]} and as {leaf.dtype}")
        view = _View(tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()))
        if memory in inputs:
            source = fakes[inputs[memory]]
            detached = source.requires_grad and not leaf.requires_grad
            results.append(_OfInput(inputs[memory], None if leaf is source else view, detached))
            continue
        if owners[memory] == 1:
            results.append(_Computed(computed))
        else:
            elements = leaf.untyped_storage().nbytes() // leaf.element_size()
            results.append(_Computed(computed, view, memory, elements))
        computed += 1
    return tuple(results)


class _Watch(TorchDispatchMode):
    """Sees every operation that runs.

    Attributes:
        draws: Whether one drew random numbers.
        statistics: The memory of running statistics, which operations write although their schemas do not say so.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws, self.statistics = False, set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = {item.name: value for item, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if given.get("training"):
            statistics = (given.get(f"running_{name}") for name in ("mean", "var"))
            self.statistics |= {_memory(tensor) for tensor in statistics if isinstance(tensor, torch.Tensor)}
        return func(*args, **kwargs)
