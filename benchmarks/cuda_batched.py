"""Decode steps of Qwen2.5-1.5B for many texts at once on a CUDA device, beside PyTorch in the same process.

Run it as ``python -m benchmarks.cuda_batched``; ``--json`` adds the figures to a file. Each lane has so many tokens in
its pages, which lie scattered in the pools. Logits are compared with PyTorch in float32 before anything is timed.
PyTorch runs in bfloat16 with a cache of the whole context for each lane, updated in place. With ``--weights int8`` each
matrix is rounded to 8 bits with a scale for each row; PyTorch then has the rounded numbers in bfloat16. With
``--kv-cache-dtype int8`` pages hold codes, and PyTorch the numbers that they stand for. ``--prepare`` only extracts and
compiles, for which it needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.initialization import no_init_weights

import npu_compiler
from benchmarks import cuda_timing
from benchmarks.cuda_quantised import Format, coded
from benchmarks.cuda_qwen import Qwen, as_numpy, logits, make_model
from benchmarks.decoder_sizes import QWEN
from cuda_runtime import CUDAExecutor
from npu_compiler.artifact.plan import ExecutionPlan
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.frontend.cache_forms import row_form
from npu_compiler.frontend.paged_decoder import PagedDecoder
from npu_runtime import Device, load_weights

_LANES = (1, 8, 32, 64, 128, 256)
_PAGE = 128
_KEYS = ("lanes", "tokens", "context", "weights", "cache")
_COMPARED = 4  # lanes whose logits are compared with those of float32


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_batched", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--lanes", nargs="+", type=int, default=list(_LANES), metavar="N")
    parser.add_argument("--tokens", type=int, default=1024, help="in the cache of each lane (default: 1024)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a lane at most (default: 2048)")
    parser.add_argument("--weights", choices=("bf16", "int8"), default="bf16", help="what they are held in")
    parser.add_argument("--kv-cache-dtype", choices=("16", "int8"), default="16", help="what pages hold")
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help="where compiled programs are kept")
    parser.add_argument("--prepare", action="store_true", help="fill that folder, and end")
    cuda_timing.add_arguments(parser, ("captured",))
    args = parser.parse_args()
    if args.prepare:
        for lanes in args.lanes:
            _program(lanes, args)
        return
    device = Device("cuda")
    ceilings = cuda_timing.ceilings(torch.bfloat16)
    qwen = Qwen()
    weights = (_rounded(qwen.model) if args.weights == "int8" else {}) | qwen.weights()
    with torch.device("meta"):
        wide = make_model()
    wide = wide.to_empty(device="cuda")
    wide.load_state_dict(qwen.model.state_dict())
    wide.model.rotary_emb = qwen.model.model.rotary_emb
    run = cuda_timing.empty_run(device, ceilings, args.tune)
    for lanes in args.lanes:
        run["results"].append(_row(qwen, weights, wide.eval(), lanes, args, device, ceilings))
        cuda_timing.write_run(args.json, run, _KEYS)
        torch.cuda.empty_cache()
    cuda_timing.print_table(run, _KEYS)


def _pages(lanes: int, args: argparse.Namespace) -> int:
    """Pages that all lanes together take."""
    return lanes * (int(args.tokens) // _PAGE + 1)


def _program(lanes: int, args: argparse.Namespace) -> CompiledProgram:
    """A decode step's program, extracted from a model without weights unless it is kept."""
    named = [lanes, args.tokens, args.context, args.weights, *([] if args.kv_cache_dtype == "16" else ["kv8"])]
    kept = args.programs and args.programs / f"decode_{'_'.join(map(str, named))}.npubin"
    if kept is not None and kept.exists():
        return CompiledProgram.load(kept)
    with no_init_weights():
        model: Any = Qwen2ForCausalLM(Qwen2Config(**QWEN | {"attn_implementation": "sdpa", "dtype": torch.bfloat16}))
        model = model.to(torch.bfloat16)
        model.tie_weights()
    sizes = model.config.num_key_value_heads, _PAGE, model.config.hidden_size // model.config.num_attention_heads
    form = row_form(args.kv_cache_dtype, torch.bfloat16)
    held = form.empty((_pages(lanes, args) + 1, *sizes)) * (2 * model.config.num_hidden_layers)
    inputs: dict[str, Any] = {name: torch.zeros(lanes, 1, dtype=torch.long) for name in ("tokens", "positions")}
    inputs["tables"] = torch.zeros(lanes, args.context // _PAGE, dtype=torch.int32)
    inputs["pools"] = tuple(torch.empty(1, dtype=kind).expand(shape) for shape, kind in held)  # of no memory
    ir = npu_compiler.extract(PagedDecoder(model, form), inputs, model_name=f"decode_{lanes}").ir
    if args.weights == "int8":
        by_row = Format(8, torch.int8)
        ir = coded(ir, by_row, by_row)
    program = npu_compiler.compile(ir, target="cuda")
    if kept is not None:
        program.save(kept)
    return program


def _rounded(model: Any) -> dict[str, Any]:
    """Rounds a model's matrices; gives their codes and scales by the names that `coded` gives them."""
    made: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scales = (parameter.detach().float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
            codes = (parameter.detach().float() / scales.float()).round().clamp(-127, 127)
            parameter.data = (codes * scales.float()).to(torch.bfloat16)
            made |= {f"model.{name}.codes": codes.to(torch.int8).cpu().numpy()}
            made |= {f"model.{name}.scales": as_numpy(scales)}
    return made


def _inputs(lanes: int, config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """A step of lanes with random tokens, whose pages lie scattered, full of random keys and values."""
    generator = torch.Generator("cuda").manual_seed(1)
    pages, used = _pages(lanes, args), args.tokens // _PAGE + 1
    shape = (pages + 1, config.num_key_value_heads, _PAGE, config.hidden_size // config.num_attention_heads)
    form = row_form(args.kv_cache_dtype, torch.bfloat16)
    pools: tuple[torch.Tensor, ...] = ()
    for _ in range(2 * config.num_hidden_layers):
        pools += form.pack(torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16))
    tables = torch.full((lanes, args.context // _PAGE), pages, dtype=torch.int32, device="cuda")
    tables[:, :used] = torch.randperm(pages, generator=generator, device="cuda").reshape(lanes, used)
    tokens = torch.randint(config.vocab_size, (lanes, 1), generator=generator, device="cuda")
    positions = torch.full((lanes, 1), args.tokens, device="cuda")
    return {"tokens": tokens, "positions": positions, "tables": tables, "pools": pools}


def _bound(plan: ExecutionPlan, inputs: dict[str, Any]) -> dict[str, Any]:
    named = {name: value for name, value in inputs.items() if name != "pools"}
    named |= {f"pools_{number}": pool for number, pool in enumerate(inputs["pools"])}
    return {spec.name: named[spec.name] for spec in plan.inputs}


def _numbers(inputs: dict[str, Any], args: argparse.Namespace, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """What each pool of keys, or values, holds."""
    form = row_form(args.kv_cache_dtype, dtype)
    for at in range(0, len(inputs["pools"]), form.tensors):
        yield form.numbers(inputs["pools"][at : at + form.tensors]).to(dtype)


def _wanted(wide: Any, inputs: dict[str, Any], args: argparse.Namespace) -> NDArray[np.float32]:
    """The logits [lanes, V] of the first lanes, in float32."""
    some = {name: value[:_COMPARED] for name, value in inputs.items() if name != "pools"}
    with torch.inference_mode(), torch.device("cuda"):
        pools = tuple(_numbers(inputs, args, torch.float32))
        found: NDArray[np.float32] = PagedDecoder(wide)(**some, pools=pools)[0][:, 0].cpu().numpy()
    return found


def _compared(output: torch.Tensor, wanted: NDArray[np.float32]) -> dict[str, Any]:
    given = output.float().reshape(-1, wanted.shape[1])[: len(wanted)].cpu().numpy()
    return {
        "Pearson r": min(cuda_timing.pearson(a, b) for a, b in zip(given, wanted, strict=True)),
        "same argmax": f"{sum(given.argmax(1) == wanted.argmax(1))} of {len(wanted)}",
    }


def _row(
    qwen: Qwen,
    weights: dict[str, NDArray[Any]],
    wide: Any,
    lanes: int,
    args: argparse.Namespace,
    device: Device,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """Figures of a step; times in milliseconds."""
    config, program = qwen.model.config, _program(lanes, args)
    executor = CUDAExecutor(program, device, tune=args.tune)
    loaded = load_weights(weights, program, device)
    inputs = _inputs(lanes, config, args)
    wanted = _wanted(wide, inputs, args)
    plan = executor.plan
    output = executor.run(_bound(plan, inputs), loaded)[plan.outputs[0].name]
    figures: dict[str, Any] = {"lanes": lanes, "tokens": args.tokens, "context": args.context}
    figures |= {"weights": args.weights, "cache": args.kv_cache_dtype}
    figures |= {"launches": len(plan.calls)} | _compared(from_dlpack(output), wanted)
    figures |= cuda_timing.repeated_milliseconds(executor.replay, executor.stream)
    parameters = sum(parameter.numel() for parameter in qwen.model.parameters())
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    seen = lanes * (args.tokens + 1)
    row = 2 * width if args.kv_cache_dtype == "16" else width + 4 * config.num_key_value_heads
    moved = (1 if args.weights == "int8" else 2) * parameters + 2 * config.num_hidden_layers * row * seen
    flops = 2 * parameters * lanes + 4 * config.num_hidden_layers * config.hidden_size * seen
    figures |= cuda_timing.shares(figures["npu"], moved, flops, ceilings)
    figures["tokens/s"] = lanes / figures["npu"] * 1e3
    figures |= _peers(qwen, lanes, args, inputs, wanted)
    return figures | cuda_timing.best_peer(figures)


def _peers(
    qwen: Qwen, lanes: int, args: argparse.Namespace, inputs: dict[str, Any], wanted: NDArray[np.float32]
) -> dict[str, Any]:
    """PyTorch's figures, on the same keys and values in a cache of the whole context for each lane."""
    if not args.peers:
        return {}
    pools = _numbers(inputs, args, torch.bfloat16)
    caches = tuple(pool[inputs["tables"]].transpose(1, 2).flatten(2, 3) for pool in pools)
    given = {"tokens": inputs["tokens"], "positions": inputs["positions"][0], "caches": caches}
    peers = cuda_timing.Peers(args.peers, logits, (qwen.model, given), args.limit)
    return peers.figures(args.peers, partial(_compared, wanted=wanted))


if __name__ == "__main__":
    main()
