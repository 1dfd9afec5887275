"""ResNets on a CUDA device, beside PyTorch in the same process on the same weights.

Run it as ``python -m benchmarks.cuda_resnet``; ``--json`` writes the figures. Outputs are compared before anything is
timed. A time is the median over replays, each between two events of the device. PyTorch runs channels-last in float16:
eager, eager captured in a CUDA graph, and torch.compile (max-autotune) captured in one.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import npu_compiler
from cuda_runtime import CUDAExecutor
from npu_cli.sample_models import photograph_crops, resnet
from npu_runtime import Device, load_weights

_BATCHES = {"resnet18": (1, 64), "resnet50": (1, 8, 64, 256)}
_PEERS = ("eager", "captured", "compiled")
_WARM_UP = 10
_REPLAYS = 50


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_resnet", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", default=list(_BATCHES), choices=list(_BATCHES))
    parser.add_argument("--batches", nargs="+", type=int, help="of those measured by default, these only")
    parser.add_argument("--peers", nargs="*", default=list(_PEERS), choices=_PEERS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = Device("cuda")
    chosen = [(name, batch) for name in args.models for batch in _BATCHES[name] if batch in (args.batches or [batch])]
    results = [_measure(name, batch, device, args.peers) for name, batch in chosen]
    figures = {"machine": _machine(device), "memory bandwidth, GB/s": _bandwidth(), "results": results}
    _print(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def _machine(device: Device) -> dict[str, str]:
    return {
        "device": device.backend.name,
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def _bandwidth() -> float:
    """What a large copy on the device moves, bytes read and written counted."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _milliseconds(lambda: target.copy_(source)) / 1e6


def _measure(name: str, batch: int, device: Device, peers: list[str]) -> dict[str, Any]:
    """Checks and times one model at one batch size; times in milliseconds."""
    module = resnet(name, weights="seeded").module
    images = _images(batch)
    with tempfile.TemporaryDirectory(prefix="npu-benchmark-") as folder:
        ir = Path(folder, f"{name}.json")
        npu_compiler.extract(module, torch.from_numpy(images), ir, model_name=name)
        program = npu_compiler.compile(ir, target="cuda")
        executor = CUDAExecutor(program, device)
        weights = load_weights(ir.with_suffix(".safetensors"), program, device)
    on_device = torch.from_numpy(images).cuda()
    with torch.inference_mode():
        wanted = module.cuda()(on_device).float().cpu().numpy()
    half = on_device.half().contiguous(memory_format=torch.channels_last)
    output = executor.run({program.input_specs[0].name: half}, weights)[program.output_specs[0].name].to_numpy()
    figures: dict[str, Any] = {
        "model": name,
        "batch": batch,
        "launches": len(program.main.calls),
        **_accuracy(output, wanted),
    }
    figures["npu"] = _milliseconds(executor.replay, stream=executor.stream)
    figures["npu with copies"] = _milliseconds(
        lambda: executor.run({program.input_specs[0].name: half}, weights, sync=False), stream=executor.stream
    )
    network: torch.nn.Module = module.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for peer in peers:
        replay, result = _peer(peer, network, half)
        figures[f"{peer}, lowest Pearson r"] = _accuracy(result.float().cpu().numpy(), wanted)["lowest Pearson r"]
        figures[peer] = _milliseconds(replay)
    measured = [figures[peer] for peer in peers]
    if measured:
        figures["ratio to the best peer"] = figures["npu"] / min(measured)
    figures["TFLOP/s"] = sum(step.flops for step in program.main.calls) / figures["npu"] / 1e9
    return figures


def _images(batch: int) -> NDArray[np.float32]:
    """Photographs; from the ninth on, mixtures of them."""
    crops = photograph_crops(min(batch, 8))
    rng = np.random.default_rng(0)
    mixed = [crops[i % 8] * np.float32(rng.uniform(0.5, 1)) + crops[rng.integers(8)] * 0.3 for i in range(8, batch)]
    return np.concatenate([crops, np.stack(mixed).astype(np.float32)]) if mixed else crops


def _accuracy(given: NDArray[Any], wanted: NDArray[Any]) -> dict[str, Any]:
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(given, wanted, strict=True)]
    return {
        "lowest Pearson r": min(float(np.corrcoef(a, b)[0, 1]) for a, b in pairs),
        "same top-5": sum(set(np.argsort(-a)[:5]) == set(np.argsort(-b)[:5]) for a, b in pairs) / len(pairs),
    }


def _peer(name: str, network: torch.nn.Module, images: torch.Tensor) -> tuple[Callable[[], object], torch.Tensor]:
    """A way of PyTorch's to run the network: what runs it once more, and its output."""
    call: Callable[[torch.Tensor], torch.Tensor] = network
    if name == "compiled":
        torch._dynamo.reset()
        call = torch.compile(network, mode="max-autotune-no-cudagraphs")
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                result = call(images)
        torch.cuda.current_stream().wait_stream(side)
        if name == "eager":
            return lambda: _without_gradients(call, images), result
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(images)
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay, result


def _without_gradients(call: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return call(images)


def _milliseconds(replay: Callable[[], object], stream: int | None = None) -> float:
    """Median time of a replay on a stream, PyTorch's own when not given."""
    on = torch.cuda.current_stream() if stream is None else torch.cuda.ExternalStream(stream)
    for _ in range(_WARM_UP):
        replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(on)
        replay()
        end.record(on)
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(median(times))


def _print(figures: dict[str, Any]) -> None:
    table = Table(title=", ".join(figures["machine"].values()))
    rows = figures["results"]
    table.add_column(f"copy: {figures['memory bandwidth, GB/s']:.0f} GB/s")
    for row in rows:
        table.add_column(f"{row['model']}, {row['batch']}", justify="right")
    for key in rows[0]:
        if key not in ("model", "batch"):
            table.add_row(key, *(_text(row[key]) for row in rows))
    Console(width=160).print(table)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.7f}" if 0.99 < value < 1 else f"{value:.3f}"
    return str(value)


if __name__ == "__main__":
    main()
