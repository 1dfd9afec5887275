"""Ops on a CUDA device beside PyTorch eager in the same process, at sizes that real models have.

Run it as ``python -m benchmarks.cuda_ops``; ``--json`` adds the figures to a file. Outputs are compared with PyTorch in
float32 (with the same values, where they are numbers of half precision) before anything is timed. PyTorch runs eager,
and eager captured in a CUDA graph, which leaves the time of its kernels alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import npu_compiler
from benchmarks import cuda_timing
from cuda_runtime import CUDAExecutor
from npu_runtime import Device, load_weights

_KEYS = ("op",)
_VOCABULARY = 151_936


class _Function(nn.Module):
    """A function of tensors, as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self._function(*tensors)


class _Sequence(nn.Module):
    """A recurrent layer's outputs over all steps."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)[0]
        return made


def _places(count: int, *shape: int) -> Tensor:
    return torch.randint(count, shape)


_Case = tuple[Callable[[], nn.Module], Callable[[], Sequence[Tensor]]]


def _case(function: Callable[..., Any], *make: Callable[[], Tensor]) -> _Case:
    return lambda: _Function(function), lambda: [one() for one in make]


def _layer(layer: Callable[[], nn.Module], *shape: int) -> _Case:
    return layer, lambda: [torch.randn(shape)]


def _floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def _resized(mode: str, size: int, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, size=(size, size), mode=mode, **options)


_CASES: dict[str, _Case] = {
    "nearest, [8, 256, 64, 64] to 128": _case(_resized("nearest", 128), _floats(8, 256, 64, 64)),
    "bilinear, [8, 256, 64, 64] to 128": _case(_resized("bilinear", 128), _floats(8, 256, 64, 64)),
    "bilinear, [1, 21, 28, 28] to 224": _case(_resized("bilinear", 224), _floats(1, 21, 28, 28)),
    "bicubic, [8, 3, 224, 224] to 448": _case(_resized("bicubic", 448), _floats(8, 3, 224, 224)),
    "bilinear antialiased, [8, 3, 512, 512] to 224": _case(
        _resized("bilinear", 224, antialias=True), _floats(8, 3, 512, 512)
    ),
    "cumsum, [1, 151936]": _case(lambda x: x.cumsum(-1), _floats(1, _VOCABULARY)),
    "cumsum, [64, 151936]": _case(lambda x: x.cumsum(-1), _floats(64, _VOCABULARY)),
    "cumsum, [4096, 1024]": _case(lambda x: x.cumsum(1), _floats(4096, 1024)),
    "cumsum along the first, [4096, 1024]": _case(lambda x: x.cumsum(0), _floats(4096, 1024)),
    "sort, [1, 151936]": _case(lambda x: x.sort(-1).values, _floats(1, _VOCABULARY)),
    "sort, [64, 8192]": _case(lambda x: x.sort(-1).values, _floats(64, 8192)),
    "sort, [4096, 1024]": _case(lambda x: x.sort(-1).values, _floats(4096, 1024)),
    "top 50 of [1, 151936]": _case(lambda x: x.topk(50).values, _floats(1, _VOCABULARY)),
    "top 50 of [64, 151936]": _case(lambda x: x.topk(50).values, _floats(64, _VOCABULARY)),
    "top 8 of [4096, 128]": _case(lambda x: x.topk(8).values, _floats(4096, 128)),
    "top 1000 of [8, 20000]": _case(lambda x: x.topk(1000).values, _floats(8, 20_000)),
    "gather, [4096, 1024]": _case(lambda x, i: x.gather(1, i), _floats(4096, 1024), lambda: _places(1024, 4096, 1024)),
    "rows of [32768, 1024]": _case(
        lambda x, i: x.index_select(0, i), _floats(32_768, 1024), lambda: _places(32_768, 8192)
    ),
    "index_add, 8192 rows to [2048, 1024]": _case(
        lambda x, i, y: x.index_add(0, i, y),
        _floats(2048, 1024),
        lambda: _places(2048, 8192),
        _floats(8192, 1024),
    ),
    "scatter_add, 100000 rows to [10000, 64]": _case(
        lambda x, i, y: x.scatter_add(0, i[:, None].expand(-1, 64), y),
        _floats(10_000, 64),
        lambda: _places(10_000, 100_000),
        _floats(100_000, 64),
    ),
    "scatter, [4096, 1024] along a permutation": _case(
        lambda x, i, y: x.scatter(1, i, y),
        _floats(4096, 1024),
        lambda: torch.rand(4096, 1024).argsort(-1),
        _floats(4096, 1024),
    ),
    "grid_sample, [8, 64, 128, 128]": _case(
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        _floats(8, 64, 128, 128),
        lambda: torch.rand(8, 128, 128, 2) * 2 - 1,
    ),
    "conv1d 80 to 384, k 3, [1, 80, 3000]": _layer(lambda: nn.Conv1d(80, 384, 3, padding=1), 1, 80, 3000),
    "conv1d 384, k 3, stride 2, [1, 384, 3000]": _layer(lambda: nn.Conv1d(384, 384, 3, 2, 1), 1, 384, 3000),
    "conv1d 1 to 512, k 10, stride 5, [1, 1, 160000]": _layer(lambda: nn.Conv1d(1, 512, 10, 5), 1, 1, 160_000),
    "conv1d 512, k 3, stride 2, [4, 512, 16000]": _layer(lambda: nn.Conv1d(512, 512, 3, 2), 4, 512, 16_000),
    "transposed 256 to 128, k 2, stride 2, [8, 256, 64, 64]": _layer(
        lambda: nn.ConvTranspose2d(256, 128, 2, 2), 8, 256, 64, 64
    ),
    "transposed 256 to 128, k 4, stride 2, [8, 256, 32, 32]": _layer(
        lambda: nn.ConvTranspose2d(256, 128, 4, 2, 1), 8, 256, 32, 32
    ),
    "transposed 1-d 512 to 256, k 16, stride 8, [1, 512, 400]": _layer(
        lambda: nn.ConvTranspose1d(512, 256, 16, 8, 4), 1, 512, 400
    ),
    "depthwise 7 * 7, [32, 96, 56, 56]": _layer(lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96), 32, 96, 56, 56),
    "depthwise 3 * 3, stride 2, [32, 96, 112, 112]": _layer(
        lambda: nn.Conv2d(96, 96, 3, 2, 1, groups=96), 32, 96, 112, 112
    ),
    "group_norm 32, [8, 320, 64, 64]": _layer(lambda: nn.GroupNorm(32, 320), 8, 320, 64, 64),
    "reflection pad 3, [8, 64, 128, 128]": _case(lambda x: F.pad(x, (3, 3, 3, 3), "reflect"), _floats(8, 64, 128, 128)),
    "LSTM 512, 256 steps, batch 1": _layer(lambda: _Sequence(nn.LSTM(512, 512, batch_first=True)), 1, 256, 512),
    "LSTM 512, 256 steps, batch 32": _layer(lambda: _Sequence(nn.LSTM(512, 512, batch_first=True)), 32, 256, 512),
    "LSTM 1024, 256 steps, batch 8": _layer(lambda: _Sequence(nn.LSTM(1024, 1024, batch_first=True)), 8, 256, 1024),
    "GRU 512, 256 steps, batch 1": _layer(lambda: _Sequence(nn.GRU(512, 512, batch_first=True)), 1, 256, 512),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_ops", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="ops whose row has one in its name")
    cuda_timing.add_arguments(parser, ("eager", "captured"))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = Device("cuda")
    run: dict[str, Any] = {"machine": cuda_timing.machine(device), "tuned": args.tune, "ceilings": {}, "results": []}
    for name, (module, inputs) in _CASES.items():
        if any(text in name for text in args.only):
            row = {"op": name, **_measured(module, inputs, device, args)}
            run["results"].append(row)
            cuda_timing.write_run(args.json, run, _KEYS)
            figures = "  ".join(f"{key} {row[key]:.4f}" for key in ("npu", *args.peers) if row.get(key) is not None)
            print(f"{name:56} {figures or row.get('refused')}", flush=True)


def _measured(
    make: Callable[[], nn.Module], inputs: Callable[[], Sequence[Tensor]], device: Device, args: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one op, in milliseconds; of one that does not lower, why."""
    torch.manual_seed(0)
    module = make().eval().half()
    given = [tensor.half() if tensor.is_floating_point() else tensor for tensor in inputs()]
    extraction = npu_compiler.extract(module, tuple(given))
    try:
        program = npu_compiler.compile(extraction, target="cuda")
    except npu_compiler.errors.NPUError as error:
        return {"refused": str(error)}
    weights = load_weights(dict(extraction.weights), program, device)
    executor = CUDAExecutor(program, device, tune=args.tune)
    on_device = [cuda_timing.channels_last(tensor.cuda()) for tensor in given]
    names = [spec.name for spec in program.input_specs]
    made = executor.run(dict(zip(names, on_device, strict=True)), weights)[program.output_specs[0].name].to_numpy()
    with torch.inference_mode():
        wanted = module.float().cuda()(*(t.float() if t.is_floating_point() else t for t in on_device))
    module.half()
    wanted = wanted.float().cpu().numpy()
    compared = _accuracy(made, wanted)
    if compared["Pearson r"] < 0.999:
        raise SystemExit(f"a Pearson r of {compared['Pearson r']}, expected at least 0.999")
    figures = {"launches": len(executor.plan.calls), **compared}
    figures |= cuda_timing.repeated_milliseconds(executor.replay, executor.stream)
    peers = cuda_timing.Peers(args.peers, module, on_device, args.limit)
    return figures | peers.figures(args.peers, lambda result: _accuracy(result.float().cpu().numpy(), wanted))


def _accuracy(given: Any, wanted: Any) -> dict[str, float]:
    apart = np.abs(np.asarray(given, np.float64).ravel() - np.asarray(wanted, np.float64).ravel())
    return {"Pearson r": cuda_timing.pearson(given, wanted), "largest error": float(apart.max())}


if __name__ == "__main__":
    main()
