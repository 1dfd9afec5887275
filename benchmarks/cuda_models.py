"""Vision, text and speech encoders on a CUDA device, beside PyTorch in the same process on the same weights.

Run it as ``python -m benchmarks.cuda_models``; ``--json`` adds the figures to a file. Outputs are compared with PyTorch
in float32 before anything is timed. PyTorch runs in float16, images channels-last: eager, captured in a CUDA graph, and
torch.compile, captured in one. Each model compiles in a process of its own first, all of them at once, so that what is
compiled is in the caches by the time that one process after the other measures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import npu_compiler
from benchmarks import cuda_timing
from cuda_runtime import CUDAExecutor
from npu_runtime import Device, load_weights

_KEYS = ("model", "batch")
_BATCHES = (1, 32)


class _First(nn.Module):
    """The first of what a model of transformers returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.model(x, return_dict=False)[0]
        return made


def _vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        module: nn.Module = getattr(torchvision.models, name)(weights=None)
        return module

    return make


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return _First(BertModel(BertConfig(), add_pooling_layer=False))


def _whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes: dict[str, Any] = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
    return _First(WhisperEncoder(WhisperConfig(**sizes)))


def _image(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224)


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "MobileNetV3-large": (_vision("mobilenet_v3_large"), _image),
    "EfficientNet-B0": (_vision("efficientnet_b0"), _image),
    "ViT-B/16": (_vision("vit_b_16"), _image),
    "Swin-T": (_vision("swin_t"), _image),
    "ConvNeXt-T": (_vision("convnext_tiny"), _image),
    "BERT-base, 128 tokens": (_bert, lambda batch: torch.randint(30_000, (batch, 128))),
    "Whisper-tiny's encoder": (_whisper, lambda batch: torch.randn(batch, 80, 3000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", default=list(_MODELS), choices=list(_MODELS), metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=_BATCHES)
    parser.add_argument("--prepare", action="store_true", help="compile only, so that caches have it")
    cuda_timing.add_arguments(parser, ("eager", "captured", "compiled"))
    args = parser.parse_args()
    if not args.prepare:
        command = [sys.executable, "-m", "benchmarks.cuda_models", *sys.argv[1:], "--prepare", "--models"]
        for process in [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in args.models]:
            process.wait()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = Device("cuda")
    run: dict[str, Any] = {"machine": cuda_timing.machine(device), "tuned": args.tune, "results": []}
    run["ceilings"] = {} if args.prepare else cuda_timing.ceilings(torch.float16)
    for name in args.models:
        for batch in args.batches:
            row = {"model": name, "batch": batch, **_measured(name, batch, device, args)}
            run["results"].append(row)
            if not args.prepare:
                cuda_timing.write_run(args.json, run, _KEYS)
                figures = "  ".join(f"{key} {row[key]:.4f}" for key in ("npu", *args.peers) if row.get(key) is not None)
                print(f"{name:24} {batch:3}  {figures or row.get('refused')}", flush=True)


def _measured(name: str, batch: int, device: Device, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model, in milliseconds; of one that is not wholly on the device, why."""
    torch.manual_seed(0)
    make, inputs = _MODELS[name]
    module, given = _settled(make(), inputs(4)), inputs(batch)
    given = given.half() if given.is_floating_point() else given
    extraction = npu_compiler.extract(module.half(), (given,))
    try:
        program = npu_compiler.compile(extraction, target="cuda")
    except npu_compiler.errors.NPUError as error:
        return {"refused": str(error)}
    executor = CUDAExecutor(program, device, tune=args.tune)
    weights = load_weights(dict(extraction.weights), program, device)
    on_device = cuda_timing.channels_last(given.cuda())
    made = executor.run({program.input_specs[0].name: on_device}, weights)
    output = made[program.output_specs[0].name].to_numpy()
    with torch.inference_mode():
        wide = given.cuda().float() if given.is_floating_point() else given.cuda()
        wanted = module.float().cuda()(wide).cpu().numpy()
    figures: dict[str, Any] = {"launches": len(executor.plan.calls), "Pearson r": cuda_timing.pearson(output, wanted)}
    figures |= {} if args.prepare else cuda_timing.repeated_milliseconds(executor.replay, executor.stream)
    network = module.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    peers = cuda_timing.Peers(args.peers, network, (on_device,), args.limit)
    if args.prepare:
        return figures
    figures |= peers.figures(
        args.peers, lambda result: {"Pearson r": cuda_timing.pearson(result.float().cpu().numpy(), wanted)}
    )
    return figures | cuda_timing.best_peer(figures)


def _settled(module: nn.Module, images: Tensor) -> nn.Module:
    """A module whose results are worth comparing: BatchNorms have statistics, and what starts at nothing does not."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.abs().max() < 1e-3:
                parameter.normal_(0, 0.05)
        norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
        for layer in norms:
            layer.momentum = None  # statistics are the plain mean over all passes
        if norms:
            module.train()(images)
    return module.eval()


if __name__ == "__main__":
    main()
