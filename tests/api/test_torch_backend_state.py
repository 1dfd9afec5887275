"""Compiled modules as their state, their mode and the world around them change."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from npu_model.torch_backend import npu
from npu_model.weight_watch import WeightWatch
from tests.support.dynamo import close, compiled, layers, normalised

pytestmark = pytest.mark.usefixtures("fresh")

Tensor = torch.Tensor


def test_dynamo_lists_and_finds_the_backend() -> None:
    if not entry_points(group="torch_dynamo_backends", name="npu"):
        pytest.skip("the package is not installed here")
    assert "npu" in torch._dynamo.list_backends()
    close(torch.compile(lambda x: x * 2, backend="npu")(torch.ones(3)), torch.full((3,), 2.0))


def test_a_graph_is_handed_over_once() -> None:
    counter: Any = CompileCounterWithBackend(npu)  # type: ignore[arg-type]
    module, x = layers(), torch.randn(2, 10)
    fast = torch.compile(module, backend=counter, fullgraph=True)
    for _ in range(3):
        close(fast(x), module(x))
    assert (counter.frame_count, counter.op_count) == (1, 4)


def test_the_backend_called_by_itself() -> None:
    module, x = layers().eval(), torch.randn(2, 10)
    with torch.no_grad():
        close(npu(torch.fx.symbolic_trace(module), [x])(x), module(x))
        close(compiled(module, mode="reduce-overhead")(x), module(x))  # a mode is inductor's


# Weights


def _uncounted_batch(module: nn.Module) -> None:
    module.train()(torch.randn(4, 3, 5, 5) + 5)
    module.eval()


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda module: module[0].weight.mul_(-2),
    "replaced": lambda module: setattr(module[0], "bias", nn.Parameter(torch.arange(8.0))),
    "data replaced": lambda module: setattr(module[0].weight, "data", torch.randn(8, 3, 3, 3)),
    "data in place": lambda module: module[0].weight.data.mul_(-2),
    "by numpy": lambda module: np.copyto(module[0].weight.detach().numpy(), 3),
    "a buffer": lambda module: module[1].running_mean.add_(7),
    "statistics of a batch": _uncounted_batch,
    "another state": lambda module: module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}),
    "another data type and back": lambda module: module.half().float()[0].weight.zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_are_seen(change: str) -> None:
    module, x = normalised().eval(), torch.randn(2, 3, 6, 6)
    fast = compiled(module)
    with torch.no_grad():
        close(fast(x), module(x))
        CHANGES[change](module)
        close(fast(x), module(x))


@pytest.mark.filterwarnings("ignore:a graph runs in PyTorch and not on the device. it writes")
def test_statistics_that_a_compiled_module_writes_are_seen() -> None:
    """PyTorch does not count that up, and on a GPU nobody looks at the values."""
    module = normalised()
    fast, x = compiled(module), torch.randn(2, 3, 6, 6)
    running = module[1].running_mean
    assert isinstance(running, Tensor)
    watch, version = WeightWatch([running]), running._version
    watch._samples.clear()
    watch._values.clear()
    assert not watch.changed([running])
    fast(x)
    assert running._version == version
    assert watch.changed([running])
    with torch.no_grad():
        close(fast.eval()(x), module(x))


def test_what_is_written_without_gradients_is_counted() -> None:
    module, other = normalised(), normalised()
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        fast = compiled(module)
        for _ in range(2):
            close(fast(x), other(x))
    for name, value in other.state_dict().items():
        close(module.state_dict()[name], value)


def test_weights_that_share_memory() -> None:
    first, second = (nn.Linear(10, 10, bias=False) for _ in range(2))
    second.weight, module = first.weight, nn.Sequential(first, second)
    fast, x = compiled(module), torch.randn(2, 10)
    with torch.no_grad():
        close(fast(x), module(x))
        first.weight.mul_(2)
        close(fast(x), module(x))
        second.weight = nn.Parameter(torch.randn(10, 10))
        close(fast(x), module(x))


def test_state_that_a_module_writes() -> None:
    class Counting(nn.Module):
        calls: Tensor
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            self.total = self.total + x
            result: Tensor = self.total * self.calls * self.scale
            return result

    module, x = Counting(), torch.ones(3)
    fast = compiled(module)
    for call in (1, 2, 3):
        close(fast(x), x * 2 * call**2)
    module.scale = 0.5
    close(fast(x), x * 8)


def test_a_parameter_that_a_function_writes() -> None:
    weight = nn.Parameter(torch.ones(3))

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            weight.mul_(2)
        return x * weight

    fast = compiled(function)
    with torch.no_grad():
        close(fast(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.warns(UserWarning, match="it writes into its inputs, and gradients are wanted"):
        close(fast(torch.ones(3)), torch.full((3,), 4.0))
    close(weight.detach(), torch.full((3,), 4.0))


# Modes


def test_training_and_evaluation_take_turns() -> None:
    module = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Dropout())
    fast, x = compiled(module), torch.randn(4, 10)
    for _ in range(2):
        module.eval()
        with torch.no_grad():
            close(fast(x), module(x))
            module.train()
            assert (fast(x) == 0).any()


def test_autocast() -> None:
    module, x = layers().eval(), torch.randn(2, 10)
    fast = compiled(module)

    def inside(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            low = module(x)
        with torch.autocast("cpu", enabled=False):
            return low, module(x)

    with torch.no_grad():
        for function, plain in ((fast, module), (compiled(inside), inside)):
            for enabled in (True, False):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    found, wanted = function(x), plain(x)
                pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
                for pair in pairs:
                    torch.testing.assert_close(*pair, rtol=3e-2, atol=3e-2)


# Modules


def test_a_module_that_was_compiled_is_copied_and_pickled() -> None:
    module, x = layers().eval(), torch.randn(2, 10)
    fast = compiled(module)
    with torch.no_grad():
        wanted = fast(x)
        for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.deepcopy(fast)):
            close(same(x), wanted)
        file = io.BytesIO()
        torch.save(fast.state_dict(), file)
        assert file.tell()
        module.compile(backend=npu)
        close(module(x), wanted)
        close(pickle.loads(pickle.dumps(module))(x), wanted)


def test_several_modules() -> None:
    modules = [nn.Linear(10, 10) for _ in range(4)]
    shared, x = compiled(lambda module, x: module(module(x))), torch.randn(2, 10)
    with torch.no_grad():
        for _ in range(2):
            for module in modules:
                close(compiled(module)(x), module(x))
                close(shared(module, x), module(module(x)))


def test_hooks_and_subclasses_of_parameters() -> None:
    class Own(nn.Parameter):
        pass

    module, x = layers(), torch.randn(2, 10)
    module[0].weight = Own(torch.randn(10, 10))
    module[0].register_forward_hook(lambda module, args, result: result * 2)
    with torch.no_grad():
        close(compiled(module)(x), module(x))


def test_threads() -> None:
    module, rows = layers().eval(), [torch.randn(2, 10) for _ in range(3)]
    fast = compiled(module)
    results: dict[int, list[Tensor]] = {}

    def run(index: int) -> None:
        with torch.no_grad():
            results[index] = [fast(rows[index]) for _ in range(10)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(rows):
        assert len(results[index]) == 10
        for result in results[index]:
            close(result, module(x).detach())
