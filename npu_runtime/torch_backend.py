"""`torch.compile(module, backend="npu")`: what TorchDynamo hands over becomes IR, is partitioned, and runs on a device.

A graph is compiled for each set of shapes that it is called with, as its first call comes. Parameters and buffers that
the graph only reads are weights: loaded once, and again where they changed. What the graph writes into its inputs is
copied back to them. Gradients are PyTorch's: the backward pass computes the graph once more, by PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from npu_compiler.compiler import compile as compile_program
from npu_compiler.errors import ExtractionError, NPUError
from npu_compiler.frontend.extraction import extract
from npu_compiler.partitioner import partition
from npu_runtime.device import Device
from npu_runtime.model import load

__all__ = ["npu"]

_Key = tuple[Any, ...]


def npu(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend, as PyTorch finds it by the entry point ``torch_dynamo_backends``.

    Args:
        graph: What dynamo traced.
        example_inputs: What it was traced with.
        options: Of ``torch.compile(..., options={"device": "cuda:1"})``: the device to run on; when omitted the CUDA
            device that the inputs lie on, or the best of the machine.

    Returns:
        What runs in the graph's place. Where a graph cannot become IR it runs in PyTorch, with a warning that says why.
    """
    return _Graph(graph, (options.get("options") or {}).get("device"))


class _Wrapper(torch.nn.Module):
    """A graph as a module of its own: what it only reads are its buffers, numbers are constants, the rest are inputs.

    It returns what the graph returns, and the inputs that the graph writes.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, args: Sequence[Any], weights: Sequence[int], written: Sequence[int]
    ):
        super().__init__()
        self.graph = graph
        self.training = graph.training = False  # the graph itself says what is trained
        self._template = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._inputs = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and i not in weights]
        self._weights, self._written = weights, written
        for index in weights:
            self.register_buffer(_weight_name(index), args[index].detach())

    def forward(self, *tensors: torch.Tensor) -> Any:
        args = list(self._template)
        for index, tensor in zip(self._inputs, tensors, strict=True):
            args[index] = tensor
        for index in self._weights:
            args[index] = getattr(self, _weight_name(index))
        results = self.graph(*args)
        return results, [args[index] for index in self._written]


def _weight_name(index: int) -> str:
    return f"weight_{index}"


class _Compiled:
    """A graph for one set of shapes."""

    def __init__(self, graph: torch.fx.GraphModule, args: Sequence[Any], device: Device) -> None:
        self._written = _written(graph, args)
        self._weights = [i for i, arg in enumerate(args) if _is_weight(arg) and i not in self._written]
        wrapper = _Wrapper(graph, args, self._weights, self._written)
        self._inputs = wrapper._inputs
        extraction = extract(wrapper, tuple(args[index] for index in self._inputs), model_name="graph")
        plan = partition(extraction.ir, target=device.target)
        whole = len(plan.partitions) == 1 and plan.partitions[0].on_device
        source = compile_program(extraction.ir, device.target) if whole else plan
        self._names = {_weight_name(index): index for index in self._weights}
        self._constants = {name: value for name, value in extraction.weights.items() if name not in self._names}
        self._seen, self._own = _versions(args, self._weights), self._own_weights(args)
        self._model = load(source, self._constants | self._own, device)

    def __call__(self, args: Sequence[Any]) -> Any:
        seen = _versions(args, self._weights)
        if seen != self._seen:
            self._seen, self._own = seen, self._own_weights(args)
            self._model.load_weights(self._constants | self._own)
        results, written = self._model(*(args[index].detach() for index in self._inputs))
        for index, value in zip(self._written, written, strict=True):
            args[index].copy_(value)
        return results

    def _own_weights(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The weights by name; while they are held, no other tensor takes their address."""
        return {name: args[index].detach() for name, index in self._names.items()}


class _Graph:
    """A graph that dynamo traced, called with its inputs: tensors, and numbers where shapes vary."""

    def __init__(self, graph: torch.fx.GraphModule, device: str | None) -> None:
        self._graph, self._device = graph, device
        self._numbers = _take_numbers(graph)
        self._compiled: dict[_Key, _Compiled | None] = {}

    def __call__(self, *args: Any) -> Any:
        if self._numbers:
            args = tuple(arg.item() if index in self._numbers else arg for index, arg in enumerate(args))
        compiled = self._for(args)
        if compiled is None:
            return self._graph(*args)
        if not (torch.is_grad_enabled() and any(_needs_gradient(arg) for arg in args)):
            return compiled(args)
        if compiled._written:  # PyTorch knows how gradients pass through memory that is written
            return self._graph(*args)
        flat: list[Any] = []
        outputs = _Differentiable.apply(self._graph, compiled, flat, *args)  # type: ignore[no-untyped-call]
        tensors = iter(outputs)
        return tuple(next(tensors) if isinstance(item, torch.Tensor) else item for item in flat)

    def _for(self, args: Sequence[Any]) -> _Compiled | None:
        """The graph for the shapes of `args`; None where PyTorch has to run it."""
        key = tuple((tuple(arg.shape), arg.dtype, arg.device) if isinstance(arg, torch.Tensor) else arg for arg in args)
        if key not in self._compiled:
            limit = torch._dynamo.config.recompile_limit
            if len(self._compiled) >= limit:
                self._warn(f"it was called with {limit} sets of shapes, torch._dynamo.config.recompile_limit")
                return None
            try:
                self._compiled[key] = _Compiled(self._graph, args, self._chosen(args))
            except NPUError as error:
                self._warn(str(error))
                self._compiled[key] = None
        return self._compiled[key]

    def _chosen(self, args: Sequence[Any]) -> Device:
        on_cuda = [arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type == "cuda"]
        if self._device is not None or not on_cuda:
            return Device.of(self._device)
        return Device(f"cuda:{on_cuda[0].index or 0}")

    @staticmethod
    def _warn(reason: str) -> None:
        warnings.warn(f"a graph runs in PyTorch and not on the device: {reason}", stacklevel=3)


class _Differentiable(torch.autograd.Function):
    """The device's results, with gradients from the same graph run by PyTorch."""

    @staticmethod
    def forward(ctx: Any, graph: Any, compiled: _Compiled, flat: list[Any], *args: Any) -> tuple[torch.Tensor, ...]:
        ctx.graph, ctx.places = graph, [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(args[index] for index in ctx.places))
        flat.extend(compiled(args))
        outputs = tuple(item for item in flat if isinstance(item, torch.Tensor))
        ctx.mark_non_differentiable(*(item for item in outputs if not item.dtype.is_floating_point))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        args = list(ctx.others)
        for index, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[index] = tensor.detach().requires_grad_(tensor.requires_grad)
        wanted = [index for index in ctx.places if args[index].requires_grad]
        with torch.enable_grad():
            results = [item for item in ctx.graph(*args) if isinstance(item, torch.Tensor)]
        pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad and g is not None]
        found = torch.autograd.grad(
            [result for result, _ in pairs], [args[i] for i in wanted], [g for _, g in pairs], allow_unused=True
        )
        by_place = dict(zip(wanted, found, strict=True))
        return (None, None, None, *(by_place.get(index) for index in range(len(args))))


def _take_numbers(graph: torch.fx.GraphModule) -> frozenset[int]:
    """Makes numbers of the inputs that are tensors only because dynamo lets numbers vary so; gives their places."""
    numbers = set()
    for index, place in enumerate(graph.graph.find_nodes(op="placeholder")):
        users = list(place.users)
        if users and all((user.op, user.target) == ("call_method", "item") for user in users):
            numbers.add(index)
            for user in users:
                user.replace_all_uses_with(place)
                graph.graph.erase_node(user)
    if numbers:
        graph.recompile()
    return frozenset(numbers)


def _needs_gradient(arg: object) -> bool:
    return isinstance(arg, torch.Tensor) and arg.requires_grad


def _is_weight(arg: object) -> bool:
    """Whether dynamo passes a tensor because a module holds it."""
    return isinstance(arg, torch.nn.Parameter) or hasattr(arg, "_dynamo_static_input_type")


def _versions(args: Sequence[Any], weights: Sequence[int]) -> list[tuple[int, int]]:
    """What changes when the memory of a weight is written or replaced."""
    tensors = [args[index] for index in weights]
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


def _written(graph: torch.fx.GraphModule, args: Sequence[Any]) -> list[int]:
    """The inputs that a graph changes in place: those whose version counts up when it runs on tensors without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fakes = [mode.from_tensor(arg.detach()) if isinstance(arg, torch.Tensor) else arg for arg in args]
        before = [fake._version if isinstance(fake, torch.Tensor) else 0 for fake in fakes]
        try:
            graph(*fakes)
        except Exception as error:  # whatever an operator says that cannot run without values
            raise ExtractionError(f"its shapes depend on values: {type(error).__name__}: {error}") from error
        return [i for i, fake in enumerate(fakes) if isinstance(fake, torch.Tensor) and fake._version != before[i]]
