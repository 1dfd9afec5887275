"""Vision, text and speech encoders on a CUDA device, beside PyTorch in the same process on the same weights.

Run it as ``python -m benchmarks.cuda_models``; ``--json`` adds the figures to a file. Outputs are compared with PyTorch
in float32 before anything is timed. PyTorch runs in float16, images channels-last: eager, captured in a CUDA graph, and
torch.compile, captured in one. Each model at each batch has a process of its own: all compile at once, and then one
after the other tunes and measures, while the others wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

import npu_compiler
from benchmarks import cuda_timing
from cuda_runtime import CUDAExecutor
from cuda_runtime.backend import CUDABackend
from cuda_runtime.capability import fitting_options
from npu_compiler.artifact.plan import CallChoice, ExecutionPlan
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
    parser.add_argument(
        "--patience", type=float, default=900.0, metavar="SECONDS", help="for all to compile; the rest is left out"
    )
    cuda_timing.add_arguments(parser, ("eager", "captured", "compiled"))
    args = parser.parse_args()
    rows = [(name, batch) for name in args.models for batch in args.batches]
    workers: dict[tuple[str, int], Connection] = {}
    processes = {}
    for row in rows:
        workers[row], theirs = get_context("spawn").Pipe()
        processes[row] = get_context("spawn").Process(target=_work, args=(*row, args, theirs))
        processes[row].start()
        theirs.close()
    ready = _ready(workers, args.patience)
    for row in [row for row in rows if row not in ready]:
        processes[row].terminate()
        processes[row].join()
        print(f"{row[0]:24} {row[1]:3}  was not ready", flush=True)
    device = Device("cuda")
    run: dict[str, Any] = {"machine": cuda_timing.machine(device), "tuned": args.tune, "results": []}
    run["ceilings"] = cuda_timing.ceilings(torch.float16)
    for name, batch in [row for row in rows if row in ready]:
        worker = workers[name, batch]
        worker.send("your turn")
        try:
            figures = {"model": name, "batch": batch, **worker.recv()}
        except EOFError:  # what went wrong there is on its standard error
            continue
        run["results"].append(figures)
        cuda_timing.write_run(args.json, run, _KEYS)
        shown = "  ".join(f"{key} {figures[key]:.4f}" for key in ("npu", *args.peers) if figures.get(key) is not None)
        print(f"{name:24} {batch:3}  {shown or figures.get('refused')}", flush=True)


def _ready(workers: Mapping[tuple[str, int], Connection], patience: float) -> set[tuple[str, int]]:
    """The rows whose processes are ready to measure, once all are, or have ended, or time is up."""
    rows = {connection: row for row, connection in workers.items()}
    waiting, ready, end = list(rows), set(), monotonic() + patience
    while waiting and monotonic() < end:
        for connection in wait(waiting, max(0.0, end - monotonic())):
            assert isinstance(connection, Connection)
            waiting.remove(connection)
            try:
                connection.recv()
            except EOFError:
                continue
            ready.add(rows[connection])
    return ready


def _work(name: str, batch: int, args: argparse.Namespace, connection: Connection) -> None:
    """What the process of a row does: it compiles, says so, and measures when it is told to."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    figures = _prepared(name, batch, Device("cuda"), args)
    connection.send("ready")
    connection.recv()
    connection.send(figures())


def _prepared(name: str, batch: int, device: Device, args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """A function that measures a model, in milliseconds; of one that is not wholly on the device, it says why."""
    torch.manual_seed(0)
    make, inputs = _MODELS[name]
    module, given = _settled(make(), inputs(4)), inputs(batch)
    given = given.half() if given.is_floating_point() else given
    extraction = npu_compiler.extract(module.half(), (given,))
    try:
        program = npu_compiler.compile(extraction, target="cuda")
    except npu_compiler.errors.NPUError as error:
        reason = str(error)
        return lambda: {"refused": reason}
    executor = CUDAExecutor(program, device)
    weights = load_weights(dict(extraction.weights), program, device)
    on_device = cuda_timing.channels_last(given.cuda())
    ours = {program.input_specs[0].name: on_device}
    if args.tune:
        _compile_options(program.main, device)
    with torch.inference_mode():
        wide = given.cuda().float() if given.is_floating_point() else given.cuda()
        wanted = module.float().cuda()(wide).cpu().numpy()
    network = module.half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    peers = cuda_timing.Peers(args.peers, network, (on_device,), args.limit)

    def compared(result: Tensor) -> dict[str, float]:
        return {"Pearson r": cuda_timing.pearson(result.float().cpu().numpy(), wanted)}

    def figures() -> dict[str, Any]:
        if args.tune:
            executor.tune(ours, weights)
        output = executor.run(ours, weights)[program.output_specs[0].name].to_numpy()
        found: dict[str, Any] = {"launches": len(executor.plan.calls)}
        found["Pearson r"] = cuda_timing.pearson(output, wanted)
        found |= cuda_timing.repeated_milliseconds(executor.replay, executor.stream)
        found |= peers.figures(args.peers, compared)
        return found | cuda_timing.best_peer(found)

    return figures


def _compile_options(plan: ExecutionPlan, device: Device) -> None:
    """Compiles the kernels of all options, so that tuning need not."""
    backend = device.backend
    assert isinstance(backend, CUDABackend)

    def option(number: int, choice: CallChoice) -> int:
        fitting = fitting_options(choice, backend.capability)
        return fitting[number % len(fitting)]

    most = max((len(step.options) for step in plan.steps if isinstance(step, CallChoice)), default=0)
    for number in range(most):
        backend.prepare(plan.resolved(lambda choice, _: option(number, choice)))  # noqa: B023 - called at once


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
