"""ResNets on a CUDA device, beside PyTorch in the same process on the same weights.

Run it as ``python -m benchmarks.cuda_resnet``; ``--json`` adds the figures to a file. Outputs are compared with PyTorch
in float32 before anything is timed. PyTorch runs channels-last in float16: eager, eager captured in a CUDA graph, and
torch.compile in two modes, captured in one. With ``--int8`` networks go from codes of eight bits to codes, beside the
same in 16 bits: PyTorch has no kernels for them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

import npu_compiler
from benchmarks import cuda_timing
from benchmarks.coded_images import with_codes
from cuda_runtime import CUDAExecutor
from npu_cli.sample_models import photograph_crops, resnet
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, load_weights
from npu_runtime.weight_loader import Weights

_BATCHES = {"resnet18": (1, 64), "resnet50": (1, 8, 64, 256)}
_KEYS = ("model", "batch")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_resnet", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", default=list(_BATCHES), choices=list(_BATCHES))
    parser.add_argument("--batches", nargs="+", type=int, help="of those measured by default, these only")
    parser.add_argument("--int8", action="store_true", help="codes of eight bits, as PT2E writes them")
    cuda_timing.add_arguments(parser)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = Device("cuda")
    measured = cuda_timing.ceilings(torch.float16)
    run = cuda_timing.empty_run(device, measured, args.tune)
    for name in args.models:
        for batch in _BATCHES[name]:
            if batch in (args.batches or [batch]):
                measure = _measure_codes if args.int8 else _measure
                run["results"].append(measure(name, batch, device, measured, args))
                cuda_timing.write_run(args.json, run, _KEYS)
    cuda_timing.print_table(run, _KEYS)


def _measure(
    name: str, batch: int, device: Device, ceilings: dict[str, float], args: argparse.Namespace
) -> dict[str, Any]:
    """Checks and times one model at one batch size; times in milliseconds."""
    images = images_of(batch)
    module, program, weights = compiled_resnet(name, images, device)
    executor = CUDAExecutor(program, device, tune=args.tune)
    on_device = torch.from_numpy(images).cuda()
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        wanted = module.cuda()(on_device).float().cpu().numpy()
    half = on_device.half().contiguous(memory_format=torch.channels_last)
    given = {program.input_specs[0].name: half}
    output = executor.run(given, weights)[program.output_specs[0].name].to_numpy()
    figures: dict[str, Any] = {"model": name, "batch": batch, "launches": len(executor.plan.calls)}
    figures |= _accuracy(output, wanted)
    figures |= cuda_timing.repeated_milliseconds(executor.replay, executor.stream)
    figures["npu with copies"] = cuda_timing.milliseconds(
        lambda: executor.run(given, weights, sync=False), executor.stream
    )
    moved = sum(call.nbytes for call in executor.plan.calls)
    figures |= cuda_timing.shares(figures["npu"], moved, counter.get_total_flops(), ceilings)
    network: torch.nn.Module = module.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    peers = cuda_timing.Peers(args.peers, network, (half,), args.limit)
    figures |= peers.figures(args.peers, lambda result: _accuracy(result.float().cpu().numpy(), wanted))
    return figures | cuda_timing.best_peer(figures)


def _measure_codes(
    name: str, batch: int, device: Device, ceilings: dict[str, float], args: argparse.Namespace
) -> dict[str, Any]:
    """A network of codes beside the same in 16 bits; it is compared with its own graph in PyTorch."""
    images = images_of(batch)
    few = torch.from_numpy(images[:8])
    figures: dict[str, Any] = {"model": f"{name}, int8", "batch": batch}
    for kind in ("npu", "npu in 16 bits"):
        plain = resnet(name, weights="seeded").module
        module = with_codes(plain, few) if kind == "npu" else plain
        program, weights = _compiled(module, name, images, device)
        executor = CUDAExecutor(program, device, tune=args.tune)
        half = torch.from_numpy(images).cuda().half().contiguous(memory_format=torch.channels_last)
        output = executor.run({program.input_specs[0].name: half}, weights)[program.output_specs[0].name].to_numpy()
        if kind == "npu":
            with torch.inference_mode():
                figures |= _accuracy(output, module.cuda()(half.float()).cpu().numpy())
            figures["launches"] = len(executor.plan.calls)
            figures |= cuda_timing.repeated_milliseconds(executor.replay, executor.stream)
            moved = sum(call.nbytes for call in executor.plan.calls)
            flops = sum(call.flops for call in executor.plan.calls)
            figures |= cuda_timing.shares(figures["npu"], moved, flops, ceilings)
        else:
            figures[kind] = cuda_timing.milliseconds(executor.replay, executor.stream)
    return figures


def compiled_resnet(
    name: str, images: NDArray[np.float32], device: Device
) -> tuple[torch.nn.Module, CompiledProgram, Weights]:
    """A ResNet with seeded weights, and the same compiled for these images, with its weights on the device."""
    module = resnet(name, weights="seeded").module
    return module, *_compiled(module, name, images, device)


def _compiled(
    module: torch.nn.Module, name: str, images: NDArray[np.float32], device: Device
) -> tuple[CompiledProgram, Weights]:
    with tempfile.TemporaryDirectory(prefix="npu-benchmark-") as folder:
        ir = Path(folder, f"{name}.json")
        npu_compiler.extract(module, torch.from_numpy(images), ir, model_name=name)
        program = npu_compiler.compile(ir, target="cuda")
        return program, load_weights(ir.with_suffix(".safetensors"), program, device)


def images_of(batch: int) -> NDArray[np.float32]:
    """Photographs; from the ninth on, mixtures of them."""
    crops = photograph_crops(min(batch, 8))
    rng = np.random.default_rng(0)
    mixed = [crops[i % 8] * np.float32(rng.uniform(0.5, 1)) + crops[rng.integers(8)] * 0.3 for i in range(8, batch)]
    return np.concatenate([crops, np.stack(mixed).astype(np.float32)]) if mixed else crops


def _accuracy(given: NDArray[Any], wanted: NDArray[Any]) -> dict[str, Any]:
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(given, wanted, strict=True)]
    return {
        "lowest Pearson r": min(float(np.corrcoef(a, b)[0, 1]) for a, b in pairs),
        "same argmax": sum(int(a.argmax() == b.argmax()) for a, b in pairs) / len(pairs),
        "same top-5": sum(set(np.argsort(-a)[:5]) == set(np.argsort(-b)[:5]) for a, b in pairs) / len(pairs),
    }


if __name__ == "__main__":
    main()
