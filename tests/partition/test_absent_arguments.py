"""Arguments that were None and left no trace in pytorch-ir's lists: bound by evidence, as PyTorch binds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_ir import extract_ir

import npu_compiler
from npu_compiler import partition
from npu_compiler.errors import IRError
from npu_compiler.partitioner import PartitionPlan
from npu_runtime import DAGExecutor, Device
from tests.partition.mixed import arrays_of, check_equal
from tests.support.ir_builder import IRBuilder, Value

# PyTorch says it once in a process, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

aten = torch.ops.aten
Build = Callable[..., Any]

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))
HEADS = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(2))


class Called(nn.Module):
    """A function of inputs and of parameters, some of which are None."""

    def __init__(self, function: Build, parameters: dict[str, torch.Tensor | None]) -> None:
        super().__init__()
        self.function, self.names = function, list(parameters)
        for name, value in parameters.items():
            self.register_buffer(name, value) if name.startswith("running") else self.register_parameter(
                name, None if value is None else nn.Parameter(value, requires_grad=False)
            )
        self.eval()

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, **{name: getattr(self, name) for name in self.names})


def drawn(*shape: int, low: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))) + low


CHANNELS = {"weight": drawn(3), "bias": drawn(3, low=1)}
STATISTICS = {"running_mean": drawn(3, low=0.1), "running_var": drawn(3)}
BATCH_NORM = (False, 0.1, 1e-5)


def by_statistics(function: Build) -> tuple[Build, tuple[torch.Tensor, ...], dict[str, torch.Tensor], set[str]]:
    """A norm of images by running statistics, which are required; `function` has the order of `aten.batch_norm`."""
    return (
        lambda x, weight, bias, running_mean, running_var: function(x, weight, bias, running_mean, running_var),
        (IMAGE,),
        CHANNELS | STATISTICS,
        set(STATISTICS),
    )


# op: function of the inputs and of optional tensors by name, the inputs, the optional tensors, those that are required
OPTIONAL: dict[str, tuple[Build, tuple[torch.Tensor, ...], dict[str, torch.Tensor], set[str]]] = {
    "batch_norm": by_statistics(lambda *tensors: aten.batch_norm(*tensors, *BATCH_NORM, False)),
    "native_batch_norm": by_statistics(lambda *tensors: aten.native_batch_norm(*tensors, *BATCH_NORM)[0]),
    "_native_batch_norm_legit_no_training": by_statistics(
        lambda *tensors: aten._native_batch_norm_legit_no_training(*tensors, 0.1, 1e-5)[0]
    ),
    "instance_norm": (
        lambda x, weight, bias: aten.instance_norm(x, weight, bias, None, None, True, 0.1, 1e-5, False),
        (IMAGE,),
        CHANNELS,
        set(),
    ),
    "instance_norm by running statistics": by_statistics(
        lambda *tensors: aten.instance_norm(*tensors, *BATCH_NORM, False)
    ),
    "layer_norm": (
        lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias),
        (X,),
        {"weight": drawn(6), "bias": drawn(6, low=1)},
        set(),
    ),
    "native_layer_norm": (
        lambda x, weight, bias: aten.native_layer_norm(x, [6], weight, bias, 1e-5)[0],
        (X,),
        {"weight": drawn(6), "bias": drawn(6, low=1)},
        set(),
    ),
    "group_norm": (
        lambda x, weight, bias: F.group_norm(x, 3, weight, bias),
        (IMAGE,),
        CHANNELS,
        set(),
    ),
    "native_group_norm": (
        lambda x, weight, bias: aten.native_group_norm(x, weight, bias, 2, 3, 25, 1, 1e-5)[0],
        (IMAGE,),
        CHANNELS,
        set(),
    ),
    "rms_norm": (lambda x, weight: F.rms_norm(x, (6,), weight), (X,), {"weight": drawn(6)}, set()),
    "linear": (
        lambda x, weight, bias: F.linear(x, weight, bias),
        (X,),
        {"weight": drawn(7, 6), "bias": drawn(7)},
        {"weight"},
    ),
    "conv1d": (
        lambda x, weight, bias: F.conv1d(x, weight, bias, padding=1),
        (IMAGE[:, :, 0],),
        {"weight": drawn(4, 3, 3), "bias": drawn(4)},
        {"weight"},
    ),
    "conv2d": (
        lambda x, weight, bias: F.conv2d(x, weight, bias, padding=1),
        (IMAGE,),
        {"weight": drawn(4, 3, 3, 3), "bias": drawn(4)},
        {"weight"},
    ),
    "conv2d.padding": (
        lambda x, weight, bias: F.conv2d(x, weight, bias, padding="same"),
        (IMAGE,),
        {"weight": drawn(4, 3, 2, 3), "bias": drawn(4)},
        {"weight"},
    ),
    "convolution": (
        lambda x, weight, bias: aten.convolution(x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (IMAGE,),
        {"weight": drawn(4, 3, 3, 3), "bias": drawn(4)},
        {"weight"},
    ),
    "scaled_dot_product_attention": (
        lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask, scale=0.3),
        (HEADS,),
        {"mask": drawn(5, 5)},
        set(),
    ),
    "clamp": (
        lambda x, min, max: x + 1 if min is None and max is None else torch.clamp(x, min, max),
        (X,),
        {"min": -drawn(6) / 2, "max": drawn(6, low=0.1) / 2},
        set(),
    ),
    "diff": (
        lambda x, prepend, append: torch.diff(x, prepend=prepend, append=append),
        (X,),
        {"prepend": drawn(4, 1), "append": drawn(4, 2)},
        set(),
    ),
    "embedding_bag": (
        lambda i, weight, per_sample_weights: F.embedding_bag(
            i, weight, mode="sum", per_sample_weights=per_sample_weights
        ),
        (torch.tensor([[1, 2], [0, 4]]),),
        {"weight": drawn(5, 3), "per_sample_weights": drawn(2, 2)},
        {"weight"},
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y, weight, pos_weight: F.binary_cross_entropy_with_logits(x, y, weight, pos_weight=pos_weight),
        (X, drawn(4, 6)),
        {"weight": drawn(6), "pos_weight": drawn(6, low=2)},
        set(),
    ),
    "lstm_cell": (
        lambda x, h, w, u, b_ih, b_hh: aten.lstm_cell(x, [h, h], w, u, b_ih, b_hh)[0],
        (X, drawn(4, 2), drawn(8, 6), drawn(8, 2)),
        {"b_ih": drawn(8), "b_hh": drawn(8, low=1)},
        {"b_ih", "b_hh"},
    ),
    "searchsorted, by keyword": (
        lambda x, v, sorter: torch.searchsorted(x, v, sorter=sorter, right=True),
        (torch.tensor([0.1, 0.2, 0.4]), X),
        {"sorter": torch.tensor([1, 0, 2])},
        set(),
    ),
    "pinv, by keyword": (
        lambda x, atol, rtol: aten.linalg_pinv.atol_rtol_tensor(x, atol=atol, rtol=rtol),
        (X,),
        {"atol": torch.tensor(0.1), "rtol": torch.tensor(0.5)},
        set(),
    ),
}


def choices() -> Iterator[Any]:
    for op, (_, _, tensors, required) in OPTIONAL.items():
        free = [name for name in tensors if name not in required]
        for count in range(len(free) + 1):
            for absent in combinations(free, count):
                yield pytest.param(op, absent, id=f"{op} without {', '.join(absent) or 'nothing missing'}")


def run(plan: PartitionPlan, model: nn.Module, inputs: tuple[torch.Tensor, ...], device: Device) -> dict[str, Any]:
    executor = DAGExecutor(plan, device)
    executor.load_weights(arrays_of(dict(model.state_dict())))
    given = dict(zip((spec.name for spec in plan.inputs), inputs, strict=True))
    return executor.execute({name: tensor.numpy() for name, tensor in given.items()})


def raw(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    """What pytorch-ir extracts, from real tensors where the function makes some of its own."""
    return extract_ir(model, inputs, strict=False)


@pytest.mark.parametrize(("op", "absent"), list(choices()))
def test_any_may_be_absent(op: str, absent: tuple[str, ...], device: Device) -> None:
    function, inputs, tensors, _ = OPTIONAL[op]
    model = Called(function, {name: None if name in absent else tensor for name, tensor in tensors.items()})
    ir = raw(model, inputs)
    wanted = model(*inputs)
    for plan, rtol in ((partition(ir), 5e-3), (partition(ir, lambda node: False), 1e-6)):
        (result,) = run(plan, model, inputs, device).values()
        check_equal(op, result, wanted, rtol)


def renamed(function: Build, names: dict[str, str]) -> Build:
    return lambda *inputs, **given: function(*inputs, **{names[key]: value for key, value in given.items()})


@pytest.mark.parametrize(("op", "absent"), [choice for choice in choices() if choice.values[1]])
def test_without_telling_names_it_is_right_or_said(op: str, absent: tuple[str, ...], device: Device) -> None:
    function, inputs, tensors, _ = OPTIONAL[op]
    names = {f"t{i}": name for i, name in enumerate(tensors)}
    given = {new: None if name in absent else tensors[name] for new, name in names.items()}
    model = Called(renamed(function, names), given)
    plan = partition(raw(model, inputs), lambda node: False)
    executor = DAGExecutor(plan, device)
    wanted = model(*inputs)
    (result,) = run(plan, model, inputs, device).values()
    if is_a_prefix(absent, tensors) or "by keyword" in op:
        check_equal(op, result, wanted, 1e-6)
    else:
        assert any("by their order alone" in note for note in executor.main.notes)


def is_a_prefix(absent: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether, of what may be absent, the last ones are."""
    given = [name not in absent for name in tensors if name not in STATISTICS]
    return given == sorted(given, reverse=True)


def normed(names: tuple[str, ...], training: bool = False) -> dict[str, Any]:
    """A batch norm of an image by tensors of these names, of which the IR says no more."""
    builder = IRBuilder()
    x = builder.input("x", (2, 3, 4, 4))
    made: list[Value] = [builder.weight(f"bn.{name}", (3,)) for name in names]
    padded = [*made, *[None] * (4 - len(made))]
    settings = (training, 0.1, 1e-5, True)
    order = padded if len(names) != 2 else [None, None, *made]
    ir = builder.build(builder.call("aten.batch_norm.default", x, *order, *settings, name="bn"))
    for key in ("weight", "bias", "running_mean", "running_var"):
        ir["nodes"][0]["attrs"].pop(key, None)
    return ir


def test_what_was_assumed_is_said_in_the_plan_and_in_the_program() -> None:
    ir = normed(("running_mean", "running_var"))
    said = "weight, bias taken for absent and running_mean, running_var for given, by the names 'bn.running_mean'"
    (note,) = npu_compiler.compile(ir).main.notes
    assert note.startswith("node 'bn' (aten.batch_norm.default): ")
    assert said in note
    plan = partition(ir)
    assert plan.notes == (note,)
    assert note in plan.report()
    assert partition(ir, lambda node: False).notes == (note,)
    (node,) = plan.partitions[0].ir["nodes"]
    assert node["attrs"]["weight"] is None  # whoever reads the part alone need not guess again
    assert not npu_compiler.compile(plan.partitions[0].ir).main.notes


def test_names_that_contradict_the_order_are_refused() -> None:
    ir = normed(("running_var", "running_mean"))
    with pytest.raises(IRError, match=r"names .*bn\.running_var.* contradict the order of the arguments"):
        npu_compiler.compile(ir)
    plan = partition(ir, lambda node: False)
    with pytest.raises(IRError, match="contradict the order of the arguments"):
        DAGExecutor(plan, Device("software-metal"))


def test_names_that_contradict_the_shapes_are_refused() -> None:
    with pytest.raises(IRError, match="contradict their shapes, or its attributes, so that it cannot be told"):
        npu_compiler.compile(normed(("weight", "bias")))


def test_what_the_schema_leaves_no_choice_of_is_not_noted() -> None:
    builder = IRBuilder()
    ir = builder.build(builder.call("aten.linear.default", builder.input("x", (2, 3)), builder.weight("w", (4, 3))))
    ir["nodes"][0]["attrs"].pop("bias", None)
    assert not npu_compiler.compile(ir).main.notes
    assert not partition(ir).notes
