"""`torch.compile(module, backend="npu")`."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_model import torch_backend
from npu_model.torch_backend import npu
from tests.support.decoders import config, import_transformers
from tests.support.dynamo import close, compiled

pytestmark = pytest.mark.usefixtures("fresh")

Tensor = torch.Tensor


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The shapes of each graph that is compiled for the device."""
    seen: list[tuple[Any, ...]] = []
    original = torch_backend._Compiled.__init__

    def init(self: Any, graph: Any, args: Any, *rest: Any) -> None:
        original(self, graph, args, *rest)
        seen.append(tuple(tuple(args[index].shape) for index in self._inputs))

    monkeypatch.setattr(torch_backend._Compiled, "__init__", init)
    return seen


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": self.norm(self.layer(x) + self.shift), "rows": x.shape[0]}


def test_the_backend_is_where_pytorch_looks_for_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["npu"].partition(":")
    assert getattr(import_module(module), name) is npu


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_module_runs_on_the_device_once_for_each_set_of_shapes(dynamic: bool, made: list[Any]) -> None:
    torch.manual_seed(0)
    module = Net().eval()
    fast = torch.compile(module, backend=npu, dynamic=dynamic)
    with torch.no_grad():
        for rows in (2, 3, 2, 5, 3):
            x = torch.randn(rows, 16)
            result = fast(x)
            close(result["y"], module(x)["y"])
            assert result["rows"] == rows
    assert made == [((2, 16),), ((3, 16),), ((5, 16),)]


def test_more_shapes_than_the_limit_run_in_pytorch(made: list[Any]) -> None:
    fast = torch.compile(lambda x: x @ x.T, backend=npu, dynamic=True)
    small, more, most = (torch.randn(rows, 16) for rows in (2, 3, 4))
    with torch._dynamo.config.patch(recompile_limit=2):
        close(fast(small), small @ small.T)
        close(fast(more), more @ more.T)
        with pytest.warns(UserWarning, match="called with 2 sets of shapes"):
            close(fast(most), most @ most.T)
    assert len(made) == 2


def test_parameters_that_change_are_seen(made: list[Any]) -> None:
    module = Net().eval()
    fast, x = compiled(module), torch.randn(2, 16)
    with torch.no_grad():
        close(fast(x)["y"], module(x)["y"])
        module.layer.weight.mul_(-2)
        close(fast(x)["y"], module(x)["y"])
        module.layer.bias = torch.nn.Parameter(torch.arange(16.0))
        close(fast(x)["y"], module(x)["y"])
        module.load_state_dict(Net().state_dict())
        close(fast(x)["y"], module(x)["y"])


def test_gradients_are_pytorch_s(made: list[Any]) -> None:
    module = Net().eval()
    x = torch.randn(2, 16, requires_grad=True)
    found = torch.autograd.grad(compiled(module)(x)["y"].square().sum(), (x, *module.parameters()))
    wanted = torch.autograd.grad(module(x)["y"].square().sum(), (x, *module.parameters()))
    for pair in zip(found, wanted, strict=True):
        torch.testing.assert_close(*pair, rtol=2e-2, atol=2e-2)
    assert len(made) == 1


def test_what_a_graph_writes_is_written(made: list[Any]) -> None:
    def function(x: Tensor, cache: Tensor) -> Tensor:
        cache[1:3].add_(x)
        return cache @ cache

    x, cache, wanted = torch.ones(2, 16), torch.zeros(16, 16), torch.zeros(16, 16)
    fast = compiled(function)
    for _ in range(2):
        close(fast(x, cache), function(x, wanted))
        close(cache, wanted)
    assert len(made) == 1


def test_what_no_device_computes_runs_on_the_cpu_and_what_cannot_be_traced_in_pytorch(made: list[Any]) -> None:
    x = torch.rand(4, 16)
    close(compiled(lambda x: torch.special.i1e(x @ x.T))(x), torch.special.i1e(x @ x.T))
    assert len(made) == 1
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.warns(UserWarning, match="PyTorch"):
        assert compiled(lambda x: torch.nonzero(x).sum())(x) == torch.nonzero(x).sum()


def test_several_graphs_and_several_data_types(made: list[Any]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2 + 1
        torch._dynamo.graph_break()
        return y.relu()

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(-8, 8).to(dtype)
        result = compiled(function)(x)
        assert result.dtype == dtype
        assert result.equal(function(x))


def test_transformers_generate(made: list[Any]) -> None:
    transformers = import_transformers()
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config("Qwen2", num_hidden_layers=1)).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options["return_dict_in_generate"] = True
    wanted = module.generate(ids, **options)
    module.forward = compiled(module.forward)
    found = module.generate(ids, cache_implementation="static", **options)
    assert found.sequences.equal(wanted.sequences)
    for pair in zip(found.logits, wanted.logits, strict=True):
        close(*pair)
    assert len(made) == 2, "a graph for the prompt, and one for a token"


def test_tensors_on_a_device_that_no_kind_reads_stay_with_pytorch() -> None:
    """Which devices of PyTorch's are read where they lie, the kinds of devices say."""
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    run = npu(graph, [])
    with pytest.warns(UserWarning, match="on the device 'meta', expected tensors on one of 'cpu', 'cuda'"):
        assert run(torch.empty(2, 3, device="meta")).shape == (2, 3)
