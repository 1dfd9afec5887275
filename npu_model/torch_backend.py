"""`torch.compile(module, backend="npu")`: what TorchDynamo hands over becomes IR, is partitioned, and runs on a device.

A graph is compiled for each set of shapes that it is called with, as its first call comes. Parameters and buffers that
the graph only reads are weights: loaded once, and again where they changed. What the graph writes into its inputs is
copied back to them, and results share memory with inputs and with each other as PyTorch's do. Gradients are PyTorch's:
the backward pass computes the graph once more, by PyTorch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import Lock
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch.utils._pytree import tree_leaves

from npu_compiler.compiler import compile as compile_program
from npu_compiler.errors import DeviceError, ExtractionError, InputError, NPUError
from npu_compiler.frontend.extraction import extract
from npu_compiler.partitioner import partition
from npu_model.graph_effects import Effects, find_effects, overlap
from npu_model.model import Model, load
from npu_model.weight_watch import WeightWatch
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device, device_kinds
from npu_runtime.host_tensors import to_torch

__all__ = ["npu"]

_Key = tuple[Any, ...]
_DISTURBED = "it writes into memory that two of its tensors share"


def npu(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend, as PyTorch finds it by the entry point ``torch_dynamo_backends``.

    Args:
        graph: What dynamo traced.
        example_inputs: What it was traced with.
        options: Of ``torch.compile(..., options={"device": "cuda:1"})``: the device to run on; when omitted the
            device that the inputs lie on, or the best of the machine. A mode, which is inductor's, changes nothing.

    Returns:
        What runs in the graph's place. Where a graph cannot become IR it runs in PyTorch, with a warning that says why.

    Raises:
        InputError: There is no such option.
        DeviceError: The device that was asked for cannot be opened.
    """
    chosen = options.get("options") or {}
    unknown = sorted(chosen.keys() - {"device"})
    if unknown:
        raise InputError(f"given the option '{unknown[0]}', expected {{'device': name}}")
    return _Graph(graph, None if chosen.get("device") is None else Device.of(chosen["device"]))


class _Wrapper(torch.nn.Module):
    """A graph as a module of its own: what it only reads are its buffers, numbers are constants, the rest are inputs.

    It returns what has to be computed: results of the graph, and the inputs that the graph writes.
    """

    def __init__(self, graph: torch.fx.GraphModule, args: Sequence[Any], weights: Sequence[int], does: Effects) -> None:
        super().__init__()
        self.graph = graph
        self.training = graph.training = False  # the graph itself says what is trained
        self.inputs = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and i not in weights]
        self._template = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._weights, self._does = weights, does
        for index in weights:
            self.register_buffer(_weight_name(index), args[index].detach())

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args = list(self._template)
        for index, tensor in zip(self.inputs, tensors, strict=True):
            args[index] = tensor
        for index in self._weights:
            args[index] = getattr(self, _weight_name(index))
        results = tree_leaves(self.graph(*args))
        return [results[place] for place in self._does.computed] + [args[index] for index in self._does.written]


def _weight_name(index: int) -> str:
    return f"weight_{index}"


class _Compiled:
    """A graph for one set of shapes.

    Attributes:
        does: What it does beside computing.
    """

    def __init__(self, graph: torch.fx.GraphModule, args: Sequence[Any], does: Effects, device: Device) -> None:
        self.does = does
        self._weights = [i for i, arg in enumerate(args) if _is_weight(arg) and i not in does.written]
        wrapper = _Wrapper(graph, args, self._weights, does)
        self._inputs = wrapper.inputs
        self._names = [_weight_name(index) for index in self._weights]
        self._model: Model | None = None
        self._turn = Lock()  # a model runs for one thread at a time
        if not (does.computed or does.written):
            return
        extraction = extract(wrapper, tuple(args[index].detach() for index in self._inputs), model_name="graph")
        plan = partition(extraction.ir, target=device.target)
        whole = len(plan.partitions) == 1 and plan.partitions[0].on_device
        source = compile_program(extraction.ir, device.target) if whole else plan
        self._constants = {name: value for name, value in extraction.weights.items() if name not in self._names}
        self._watch = WeightWatch([args[index] for index in self._weights])
        self._model = load(source, self._all_weights(), device)

    def __call__(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The results that had to be computed."""
        if self._model is None:
            return []
        with self._turn:
            values = self._run(self._model, args)
        count = len(self.does.computed)
        for index, value in zip(self.does.written, values[count:], strict=True):
            args[index].copy_(_tensor(value, args[index].dtype, args[index].device))
        return [_tensor(value, *kind) for value, kind in zip(values[:count], self.does.kinds, strict=True)]

    def _run(self, model: Model, args: Sequence[Any]) -> Sequence[Any]:
        weights = [args[index] for index in self._weights]
        if self._watch.changed(weights):
            self._watch = WeightWatch(weights)
            model.load_weights(self._all_weights())
        values: Sequence[Any] = model(*(args[index].detach() for index in self._inputs))
        return values

    def is_disturbed(self, args: Sequence[Any]) -> bool:
        """Whether what the graph writes may be memory of another of its tensors."""
        if not self.does.written:
            return False
        changed = self._watch.changed([args[index] for index in self._weights])
        return overlap(args[index] for index in (*self._inputs, *(self._weights if changed else ())))

    def _all_weights(self) -> dict[str, torch.Tensor]:
        return self._constants | dict(zip(self._names, self._watch.tensors, strict=True))


class _Graph:
    """A graph that dynamo traced, called with its inputs: tensors, and numbers where shapes vary."""

    def __init__(self, graph: torch.fx.GraphModule, device: Device | None) -> None:
        self._device = device
        self._numbers = _take_numbers(graph)
        self._graph, self._held = _with_attributes(graph)
        self._compiled: dict[_Key, _Compiled | None] = {}
        self._uncounted = False

    def __call__(self, *args: Any) -> Any:
        if self._numbers:
            args = tuple(arg.item() if index in self._numbers else arg for index, arg in enumerate(args))
        args = (*args, *self._held)
        differentiable = torch.is_grad_enabled() and any(_needs_gradient(arg) for arg in args)
        compiled = self._for(args, differentiable)
        if compiled is None:
            return self._by_pytorch(args)
        if compiled.is_disturbed(args):
            self._warn(_DISTURBED)
            return self._by_pytorch(args)
        if not differentiable:
            return compiled.does.results(compiled(args), args)
        computed = _Differentiable.apply(self._graph, compiled, *args)  # type: ignore[no-untyped-call]
        return compiled.does.results(computed, args)

    def _by_pytorch(self, args: Sequence[Any]) -> Any:
        if self._uncounted:
            WeightWatch.distrust()
        return self._graph(*args)

    def _for(self, args: Sequence[Any], differentiable: bool) -> _Compiled | None:
        """The graph for the shapes of `args`; None where PyTorch has to run it."""
        key = (differentiable, *map(_key, args))
        if key in self._compiled:
            return self._compiled[key]
        with compile_lock:  # one thread traces at a time
            if key in self._compiled:
                return self._compiled[key]
            limit = torch._dynamo.config.recompile_limit
            if len(self._compiled) >= limit:
                self._warn(f"it was called with {limit} sets of shapes, torch._dynamo.config.recompile_limit")
                return None
            try:
                self._compiled[key] = self._compile(args, differentiable)
            except NPUError as error:
                self._warn(str(error))
                self._compiled[key] = None
        return self._compiled[key]

    def _compile(self, args: Sequence[Any], differentiable: bool) -> _Compiled:
        device = self._chosen(args)
        does = find_effects(self._graph, args, differentiable)
        self._uncounted |= does.uncounted
        if does.written and overlap(arg for arg in args if isinstance(arg, torch.Tensor)):
            raise ExtractionError(_DISTURBED)
        for applies, what in (
            (does.written, "writes into its inputs"),
            (does.draws, "draws random numbers"),
            (does.shares, "returns views of one tensor"),
        ):
            if differentiable and applies:
                raise ExtractionError(f"it {what}, and gradients are wanted")
        return _Compiled(self._graph, args, does, device)

    def _chosen(self, args: Sequence[Any]) -> Device:
        """The device asked for; else the one that the tensors lie on, or the best for those of the CPU."""
        holders = {kind.tensors: name for name, kind in device_kinds().items() if kind.tensors}
        places = [arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.device.type != "cpu"]
        other = next((place for place in places if place.type not in holders), None)
        if other is not None:
            known = ", ".join(map(repr, ("cpu", *holders)))
            raise DeviceError(f"given a tensor on the device '{other}', expected tensors on one of {known}")
        if self._device is not None:
            return self._device
        return Device(f"{holders[places[0].type]}:{places[0].index or 0}") if places else Device()

    @staticmethod
    def _warn(reason: str) -> None:
        warnings.warn(f"a graph runs in PyTorch and not on the device: {reason}", stacklevel=3)


class _Differentiable(torch.autograd.Function):
    """The device's results, with gradients from the same graph run by PyTorch."""

    @staticmethod
    def forward(ctx: Any, graph: Any, compiled: _Compiled, *args: Any) -> tuple[torch.Tensor, ...]:
        ctx.graph, ctx.does = graph, compiled.does
        ctx.places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(args[index] for index in ctx.places))
        computed = compiled(args)
        marked = zip(computed, compiled.does.differentiable, strict=True)
        ctx.mark_non_differentiable(*(value for value, differentiable in marked if not differentiable))
        return tuple(computed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        again = torch.is_grad_enabled()  # whether gradients of these gradients may be wanted
        args = list(ctx.others)
        for index, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[index] = tensor if again else tensor.detach().requires_grad_(tensor.requires_grad)
        wanted = [index for index in ctx.places if args[index].requires_grad]
        with torch.enable_grad():
            leaves = tree_leaves(ctx.graph(*args))
        results = [leaves[place] for place in ctx.does.computed]
        pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad and g is not None]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [args[index] for index in wanted],
            [gradient for _, gradient in pairs],
            allow_unused=True,
            create_graph=again,
        )
        by_place = dict(zip(wanted, found, strict=True))
        return (None, None, *(by_place.get(index) for index in range(len(args))))


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


def _with_attributes(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, tuple[torch.Tensor, ...]]:
    """The graph with the tensors that it holds itself, such as what an optimizer updates, as its last inputs."""
    held = [node for node in graph.graph.find_nodes(op="get_attr") if isinstance(_attribute(graph, node), torch.Tensor)]
    if not held:
        return graph, ()
    values = {str(node.target): _attribute(graph, node) for node in held}
    copied = copy.deepcopy(graph.graph)  # dynamo reads its own once more
    places = [*copied.find_nodes(op="placeholder")]
    for number, name in enumerate(values):
        with copied.inserting_after(places[-1]) if places else copied.inserting_before():
            places.append(copied.placeholder(f"held_{number}"))
        for node in copied.find_nodes(op="get_attr"):
            if node.target == name:
                node.replace_all_uses_with(places[-1])
                copied.erase_node(node)
    return torch.fx.GraphModule(graph, copied), tuple(values.values())


def _attribute(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    return attrgetter(str(node.target))(graph)


def _key(arg: object) -> object:
    """What a program is compiled for: a graph that returns a view of an input has its strides in its results."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return arg.shape, arg.stride() if arg.layout is torch.strided else arg.layout, arg.dtype, arg.device


def _tensor(value: Any, kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """A result of a model as PyTorch's; those of a model without inputs are arrays and buffers."""
    array = value.to_numpy() if isinstance(value, NPUBuffer) else value
    tensor = array if isinstance(array, torch.Tensor) else to_torch(array)
    return tensor.to(device, kind)


def _needs_gradient(arg: object) -> bool:
    return isinstance(arg, torch.Tensor) and arg.requires_grad


def _is_weight(arg: object) -> bool:
    """Whether dynamo passes a tensor because a module holds it."""
    return isinstance(arg, torch.nn.Parameter) or hasattr(arg, "_dynamo_static_input_type")
