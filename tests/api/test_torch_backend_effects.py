"""What a compiled function does beside computing is what it does in PyTorch: memory, gradients, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.dynamo import IN_PYTORCH, close, compiled, layers, normalised

pytestmark = pytest.mark.usefixtures("fresh")

Tensor = torch.Tensor


# Memory that inputs and results share


def test_an_input_that_is_written_and_returned_is_the_input() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(3)
        return x, x + 1

    x = torch.ones(4)
    same, more = compiled(function)(x)
    assert same is x
    close(x, torch.full((4,), 3.0))
    close(more, torch.full((4,), 4.0))


@pytest.mark.parametrize(
    "view",
    [lambda x: x[1:], lambda x: x.t(), lambda x: x.view(-1), lambda x: x.detach(), lambda x: x.unsqueeze(0)[..., ::2]],
)
def test_a_view_of_an_input_lies_in_its_memory(view: Callable[[Tensor], Tensor]) -> None:
    base = torch.arange(40.0).view(5, 8)
    x = base[1:]  # neither at the begin of its memory
    found = compiled(view)(x)
    assert found.equal(view(x))
    assert (found.stride(), found.storage_offset()) == (view(x).stride(), view(x).storage_offset())
    base.zero_()
    assert not found.any()


def test_a_view_of_what_was_written_shows_it() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x[1:]

    x, wanted, y = torch.ones(4), torch.ones(4), torch.arange(4.0)
    assert compiled(function)(x, y).equal(function(wanted, y))
    assert x.equal(wanted)


def test_results_that_share_memory_share_it() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return y[1:], y[:2], y * 2, y.t()

    x = torch.arange(12.0).view(4, 3)
    found, wanted = compiled(function)(x), function(x)
    for pair in zip(found, wanted, strict=True):
        close(*pair)
        assert pair[0].stride() == pair[1].stride()
    found[0].zero_()
    wanted[0].zero_()
    for pair in zip(found, wanted, strict=True):
        close(*pair)


def test_one_result_twice_is_one_tensor() -> None:
    first, second = compiled(lambda x: (lambda y: (y, y))(x + 1))(torch.ones(3))
    assert first is second


@pytest.mark.parametrize("apart_before", [False, True])
def test_inputs_that_overlap(apart_before: bool) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    fast, memory, wanted = compiled(function), torch.zeros(4), torch.zeros(4)
    if apart_before:
        close(fast(memory[:2], memory[2:]), function(wanted[:2], wanted[2:]))
        close(fast(memory, memory), function(wanted, wanted))
    with pytest.warns(UserWarning, match=f"{IN_PYTORCH}it writes into memory that two of its tensors share"):
        close(fast(memory[:2], memory[1:3]), function(wanted[:2], wanted[1:3]))
    close(memory, wanted)


def test_inputs_of_every_stride() -> None:
    fast = compiled(lambda x, y: (x.copy_(y), x.sum(0)))
    for make in (lambda: torch.ones(3, 4).t(), lambda: torch.ones(8, 3)[::2], lambda: torch.ones(4, 3)):
        x, y = make(), torch.arange(12.0).view(4, 3)
        same, sums = fast(x, y)
        assert same is x
        close(x, y)
        close(sums, y.sum(0))
    assert compiled(lambda x: x + 1)(torch.ones(1, 3).expand(4, 3)).equal(torch.full((4, 3), 2.0))
    image, convolution = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last), nn.Conv2d(3, 8, 3)
    with torch.no_grad():
        close(compiled(convolution)(image), convolution(image))


def test_results_stay_as_they_are() -> None:
    fast = compiled(lambda x: x + 1)
    kept = [fast(torch.full((3,), float(number))) for number in range(6)]
    kept[0].zero_()  # a result is the caller's, to write as well
    assert [float(result[0]) for result in kept] == [0, 2, 3, 4, 5, 6]


# What goes in and comes out


def test_results_that_are_no_tensors() -> None:
    found = compiled(lambda x, n=None: {"a": [x + 1, None, 3], "b": ("text", n, x.shape[0], x.sum())})(torch.ones(3))
    assert list(found) == ["a", "b"]
    assert (found["a"][1:], found["b"][:3]) == ([None, 3], ("text", None, 3))
    assert found["b"][3].shape == ()
    assert type(compiled(lambda x: torch.topk(x, 2))(torch.arange(5.0))).__name__ == "topk"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_graphs_without_inputs(dtype: torch.dtype) -> None:
    for made in (lambda: torch.ones(3, dtype=dtype), lambda: torch.eye(2, 3, dtype=dtype)):
        found = compiled(made)()
        assert (type(found), found.dtype) == (Tensor, dtype)
        assert found.equal(made())
    assert compiled(lambda x: torch.zeros(3))(torch.ones(2)).equal(torch.zeros(3))


def test_numbers_that_vary() -> None:
    fast = compiled(lambda x, n, scale, flag: x * n + scale if flag else x * scale)
    for n, scale, flag in ((1, 1.5, True), (2, 2.5, True), (3, 2.5, False), (4, -4.0, False)):
        close(fast(torch.ones(3), n, scale, flag), torch.full((3,), n + scale if flag else scale))


def test_sizes_that_vary() -> None:
    module = layers().eval()
    for dynamic in (True, False, None):
        torch._dynamo.reset()
        fast = compiled(module, dynamic=dynamic)
        with torch.no_grad():
            for rows in (1, 2, 3, 0, 7):
                x = torch.randn(rows, 10)
                close(fast(x), module(x))
    marked = torch.ones(3, 2)
    torch._dynamo.mark_dynamic(marked, 0)
    found = compiled(lambda x: (x * x.shape[0], x.shape[0] + 1))(marked)
    assert found[0].equal(marked * 3)
    assert found[1] == 4


def test_values_that_python_asks_for_end_a_graph() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        if y.sum() > 0:
            print(end="")
            return y * y.sum().item()
        return y - 1

    for x in (torch.ones(3), -torch.ones(3)):
        close(compiled(function)(x), function(x))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize(
    ("function", "x", "reason"),
    [
        (lambda x: x * 2, torch.ones(3, device="meta"), "given a tensor on the device 'meta'"),
        (lambda x: x.chalf(), torch.ones(3), "Got unsupported ScalarType ComplexHalf"),
        (lambda x: torch.func.grad(lambda y: (y**2).sum())(x), torch.ones(3), "it holds a transform of torch.func"),
        (lambda x: torch.vmap(lambda y: y.sum())(x), torch.ones(3, 2), "it holds a transform of torch.func"),
        (lambda x: torch.histogramdd(x, [2, 2])[0], torch.rand(5, 2), "lists inside of a tuple"),
        (lambda x: (x + 1).view(torch.int32), torch.ones(3), ""),
    ],
)
def test_what_pytorch_has_to_run(function: Callable[[Tensor], Tensor], x: Tensor, reason: str) -> None:
    if reason:
        with pytest.warns(UserWarning, match=f"{IN_PYTORCH}.*{reason}"):
            found = compiled(function)(x)
    else:
        found = compiled(function)(x)
    assert (found.device, found.dtype) == (x.device, function(x).dtype)
    assert x.is_meta or found.to(torch.complex64).equal(function(x).to(torch.complex64))


def test_options() -> None:
    assert compiled(lambda x: x + 1, options={"device": "software-metal"})(torch.ones(2)).equal(torch.full((2,), 2.0))
    refusals = ({"nonsense": 1}, "given the option 'nonsense'"), ({"device": "none"}, "given the device name 'none'")
    for options, message in refusals:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
            compiled(lambda x: x + 1, options=options)(torch.ones(2))


# Gradients


def test_which_results_carry_gradients() -> None:
    module = layers()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            apart = module(x)
        return module(x), apart, (x * 3).detach(), torch.ones(3), x.argmax(1), x.detach(), x[1:]

    x = torch.randn(2, 10, requires_grad=True)
    found, wanted = compiled(function)(x), function(x)
    assert [item.requires_grad for item in found] == [item.requires_grad for item in wanted]
    (found[0].sum() + found[6].sum()).backward()
    gradient, x.grad = x.grad, None
    (wanted[0].sum() + wanted[6].sum()).backward()
    assert gradient is not None
    assert x.grad is not None
    close(gradient, x.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    module, x = layers(), torch.randn(2, 10)
    fast = compiled(module)
    with mode():
        inside = fast(x)
        close(fast(torch.ones(2, 10)), module(torch.ones(2, 10)))  # made in this mode
        assert not inside.requires_grad
        assert inside.is_inference() == (mode is torch.inference_mode)
    outside = fast(x)
    outside.sum().backward()
    close(inside, outside.detach())
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert not fast(x).requires_grad


def test_gradients_of_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    (first,) = torch.autograd.grad(compiled(lambda x: (x**3).sum())(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    close(second, 6 * x.detach())


def test_a_backward_pass_twice() -> None:
    module, x = layers(), torch.randn(2, 10)
    loss = compiled(module)(x).sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    loss.backward()
    for parameter, gradient in zip(module.parameters(), once, strict=True):
        assert parameter.grad is not None
        close(parameter.grad, 2 * gradient)


def test_training_steps() -> None:
    """With BatchNorm, whose statistics a graph writes, and an optimizer that is compiled too."""
    modules = [nn.Sequential(normalised(), nn.Flatten(), nn.Linear(8 * 9, 3)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    optimizers = [torch.optim.SGD(module.parameters(), 0.05) for module in modules]
    torch.manual_seed(1)
    images = [torch.randn(4, 3, 5, 5) for _ in range(3)]
    for run, step, optimizer in (
        (compiled(modules[0]), compiled(optimizers[0].step), optimizers[0]),
        (modules[1], optimizers[1].step, optimizers[1]),
    ):
        with pytest.warns(UserWarning, match="gradients are wanted") if run is not modules[1] else nullcontext():
            for image in images:
                optimizer.zero_grad()
                run(image).square().mean().backward()
                step()
    for name, value in modules[1].state_dict().items():
        close(modules[0].state_dict()[name], value)


# Random numbers


def test_random_numbers_are_new_in_each_run_and_those_of_the_seed() -> None:
    def function(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    fast, x = compiled(function), torch.ones(4, 50)
    with torch.no_grad():
        assert not fast(x).equal(fast(x))
        torch.manual_seed(0)
        found = fast(x)
        torch.manual_seed(0)
        close(found, function(x))


def test_gradients_of_what_was_dropped_are_zero() -> None:
    x = torch.ones(1000, requires_grad=True)
    with pytest.warns(UserWarning, match="it draws random numbers, and gradients are wanted"):
        y = compiled(nn.Dropout(0.5))(x * 1)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(y.detach())
