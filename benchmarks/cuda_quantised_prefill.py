"""Prefill of a quantised Qwen2.5-1.5B on a CUDA device, beside the same model in bfloat16.

Run it as ``python -m benchmarks.cuda_quantised_prefill``; ``--json`` adds the figures to a file. The model has its real
shapes and random weights, in codes from the start, but for norms and embedding. Logits are compared with those of the
same codes in PyTorch, which makes numbers of them and multiplies in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.initialization import no_init_weights

import npu_compiler
from benchmarks import cuda_timing
from benchmarks.cuda_qwen import Qwen, Step, accuracy, bound, logits
from benchmarks.decoder_sizes import QWEN
from cuda_runtime import CUDAExecutor
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import FLOAT8_E4M3FN
from npu_compiler.frontend.cached_decoder import CachedDecoder
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.coded_layers import CodedLinear, CodedWeight
from npu_runtime import Device, load_weights

__all__ = ["FORMS", "QuantisedQwen", "main"]

FORMS = {
    "bf16": "bfloat16",
    "fp8": "8-bit floats, a scale for each row, by activations in 8-bit floats",
    "int8": "the same in integers",
    "int4": "integers of 4 bits in groups of 64, by activations in bfloat16",
}
_GROUP, _DEVIATION = 64, 0.02
_KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_KEYS = ("workload", "form")


class QuantisedQwen(Qwen):
    """The model on the GPU, whose linears are codes; ``bf16`` for what has none.

    Attributes:
        form: One of `FORMS`.
    """

    def __init__(self, form: str) -> None:
        self.form = form
        torch.manual_seed(0)
        self.model = _structure(form).to("cuda")
        for module in self.model.modules():
            _fill(module, form)

    def compiled(self, steps: Sequence[Step], folder: Any = None) -> CompiledProgram:
        """A program with a function for each step; what is extracted needs no weights, only their shapes."""
        model = CachedDecoder(_structure(self.form))
        irs = {
            step.function: npu_compiler.extract(model, self.inputs(step, "cpu"), model_name=step.function).ir
            for step in steps
        }
        return npu_compiler.compile(irs, target="cuda")

    def weights(self) -> dict[str, Any]:
        """Parameters and buffers by the names that the extracted graphs use."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {f"model.{name}": tensor.detach().cpu() for name, tensor in named.items()}


def _structure(form: str) -> Any:
    """The model on the host, with memory that nothing has touched."""
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(
            Qwen2Config(**QWEN), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    for name, module in list(model.named_modules()):
        if form != "bf16" and isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            rows, columns = module.weight.shape
            layer = CodedLinear(CodedWeight(_codes(form, rows, columns), torch.bfloat16), None, module.bias)
            layer.activations = _KINDS.get(form)
            model.set_submodule(name, layer)
    model.tie_weights()
    return model


def _codes(form: str, rows: int, columns: int) -> CodedMatrix:
    shape = (rows, columns)
    if form == "int4":
        scales = np.empty((rows, columns // _GROUP), np.float32)
        return CodedMatrix(shape, 4, np.empty((rows, columns // 2), np.uint8), columns, scales, _GROUP, zero=8)
    codes = torch.empty(shape, dtype=_KINDS[form]).view(torch.uint8).numpy()
    kind: Any = np.int8 if form == "int8" else FLOAT8_E4M3FN.numpy
    return CodedMatrix(shape, 8, codes.view(kind), columns, np.empty((rows, 1), np.float32), columns)


@torch.no_grad()
def _fill(module: torch.nn.Module, form: str) -> None:
    """Random numbers of a deviation, in a module's own parameters and buffers."""
    if isinstance(module, CodedWeight):
        if form == "int4":
            module.codes.random_(0, 256)
            module.scales.fill_(_DEVIATION / 4.6)  # type: ignore[operator]  # the deviation of 16 numbers in a row
            return
        rows, columns = module.codes.shape
        made = torch.randn(rows, columns, device="cuda") * _DEVIATION
        codes, scales = torch.ops.npu_codes.quantize(made, _KINDS[form])
        module.codes.copy_(codes)
        module.scales.copy_(scales)  # type: ignore[operator]
        return
    if isinstance(module, CodedLinear) and module.bias is not None:
        module.bias.zero_()
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim > 1:
            parameter.normal_(0, _DEVIATION)
        else:
            parameter.fill_(0.0 if name == "bias" else 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_quantised_prefill", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=["bf16", "fp8", "int4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192], metavar="N")
    cuda_timing.add_arguments(parser, ())
    args = parser.parse_args()
    device, ceilings = Device("cuda"), cuda_timing.ceilings(torch.bfloat16)
    run = cuda_timing.empty_run(device, ceilings, args.tune)
    for form in args.forms:
        qwen = QuantisedQwen(form)
        steps = [Step(count, max(2048, count)) for count in args.tokens]
        program = qwen.compiled(steps)
        weights = load_weights(qwen.weights(), program, device)
        for step in steps:
            executor = CUDAExecutor(program, device, step.function, tune=args.tune)
            run["results"].append(_row(qwen, step, executor, weights))
            cuda_timing.write_run(args.json, run, _KEYS)
        del qwen, weights
        torch.cuda.empty_cache()
    cuda_timing.print_table(run, _KEYS)


def _row(qwen: QuantisedQwen, step: Step, executor: CUDAExecutor, weights: Any) -> dict[str, Any]:
    """Figures of a step; times in milliseconds."""
    inputs = qwen.inputs(step)
    with torch.inference_mode():
        wanted = logits(qwen.model, inputs).float().cpu().numpy().reshape(-1)
    output = executor.run(bound(executor.plan, inputs), weights)[executor.plan.outputs[0].name]
    figures: dict[str, Any] = {"workload": step.function, "form": qwen.form, "launches": len(executor.plan.calls)}
    figures |= accuracy(from_dlpack(output), wanted)
    return figures | cuda_timing.repeated_milliseconds(executor.replay, executor.stream)


if __name__ == "__main__":
    main()
