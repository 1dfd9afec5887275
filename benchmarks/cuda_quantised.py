"""Decode steps of Qwen2.5-1.5B with weights in codes, on a CUDA GPU: milliseconds, bytes, and how far logits are.

The 16-bit step's graph gets `npu_codes.dequantize` ahead of each linear, and random codes straight in the form that
checkpoints are brought to. Logits are compared with those of the same step of the dequantised weights in 16 bits.

    python -m benchmarks.cuda_quantised --graphs FOLDER --json FILE

With a cache in codes, and a long one; graphs are extracted where they are not in the folder yet:

    python -m benchmarks.cuda_quantised --graphs FOLDER --steps decode_32768 --position 32000 \\
        --kv-cache-dtype int8 --formats "int4 in groups of 64, head int8" --json FILE

``--model 7B`` takes Qwen2.5-7B, and ``--prepare`` only extracts graphs, for which it needs no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.initialization import no_init_weights

import npu_compiler
import npu_compiler.frontend.coded_layers  # defines npu_codes::dequantize
from benchmarks import cuda_timing
from benchmarks.decoder_sizes import QWEN, QWEN_7B
from cuda_runtime import CUDAExecutor
from npu_compiler.frontend.cache_forms import row_form
from npu_compiler.frontend.cached_decoder import CachedDecoder, cache_shapes
from npu_compiler.integers import ceil_div
from npu_runtime import Device, load_weights

__all__ = ["FORMATS", "Format", "coded", "random_weights"]

_HEAD, _EMBEDDING = "model.lm_head.weight", "model.model.embed_tokens.weight"
_KEYS = ("model", "format", "cache", "length", "tokens", "logits", "position")
_MODELS = {"1.5B": QWEN, "7B": QWEN_7B}
_LENGTH = 2048  # positions of the cache of a prefill


@dataclass(frozen=True)
class Format:
    """How the weight of a linear is stored; a group of 0 is a whole row."""

    bits: int
    kind: torch.dtype = torch.uint8
    group: int = 0
    zeros: bool = False
    codebook: bool = False

    def parts(self, name: str, shape: Sequence[int]) -> dict[str, tuple[str, list[int], torch.dtype]]:
        """The tensors of a weight by the operand that they are: name, shape and type."""
        rows, columns = shape
        groups = ceil_div(columns, self.group or columns)
        found = {
            "codes": (f"{name}.codes", [rows, columns * self.bits // 8], self.kind),
            "scales": (f"{name}.scales", [rows, groups], torch.bfloat16),
        }
        if self.zeros:
            found["zeros"] = (f"{name}.zeros", [rows, ceil_div(groups * self.bits, 8)], torch.uint8)
        if self.codebook:
            found["codebook"] = ("codebook", [1 << self.bits], torch.float32)
        return found

    def attributes(self, columns: int) -> dict[str, Any]:
        return {"bits": self.bits, "columns": columns, "group": self.group or columns, "rows": 1, "zero": 0}


_ROW = Format(8, torch.int8)
FORMATS: dict[str, tuple[Format, Format] | None] = {
    "bf16": None,
    "int8 by row": (_ROW, _ROW),
    "int8 in groups of 128": (Format(8, torch.int8, 128), _ROW),
    "int4 in groups of 64, head int8": (Format(4, torch.uint8, 64, zeros=True), _ROW),
    "nf4 in groups of 64, head int8": (Format(4, torch.uint8, 64, codebook=True), _ROW),
    "fp8 by row": (Format(8, torch.float8_e4m3fn), Format(8, torch.float8_e4m3fn)),
}
"""By name the format of the layers, and of the head, which the embedding shares."""


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def coded(ir: Mapping[str, Any], layers: Format, head: Format, tied: bool = True) -> dict[str, Any]:
    """A graph whose linears take weights in codes; where the embedding shares the head's, so does it."""
    end = _EMBEDDING if tied else _HEAD
    made = copy.deepcopy(dict(ir))
    by_name = made["weight_name_mapping"]
    weights = {weight["name"]: weight for weight in made["weights"]}
    nodes: list[Any] = []

    def entry(name: str, shape: Sequence[int], kind: torch.dtype, producer: str | None = None) -> dict[str, Any]:
        value = {"name": name, "shape": list(shape), "dtype": _name(kind)}
        return value if producer is None else value | {"producer_node": producer, "producer_output_idx": 0}

    def declared(parts: Mapping[str, tuple[str, list[int], torch.dtype]]) -> dict[str, dict[str, Any]]:
        found = {}
        for part, (name, shape, kind) in parts.items():
            placeholder = f"p_{name.replace('.', '_')}"
            by_name[placeholder] = name
            weights[name] = entry(name, shape, kind)
            found[part] = entry(placeholder, shape, kind)
        return found

    def numbers(node: str, form: Format, inputs: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
        absent = {part: None for part in ("zeros", "biases", "codebook") if part not in inputs}
        attrs = {**form.attributes(shape[-1]), "dtype": "bfloat16", **absent}
        result = entry(node, shape, torch.bfloat16)
        op, given = "npu_codes.dequantize.default", list(inputs.values())
        nodes.append({"name": node, "op_type": op, "inputs": given, "outputs": [result], "attrs": attrs})
        return entry(node, shape, torch.bfloat16, node)

    for node in made["nodes"]:
        places = {value["name"]: at for at, value in enumerate(node["inputs"]) if by_name.get(value["name"]) in weights}
        found = [(by_name[name], at) for name, at in places.items() if by_name[name].endswith("weight")]
        if node["op_type"] == "aten.linear.default":
            ((weight, at),) = found
            form, name = (head, end) if weight in (_HEAD, _EMBEDDING) else (layers, weight)
            shape = node["inputs"][at]["shape"]
            node["inputs"][at] = numbers(f"numbers_{node['name']}", form, declared(form.parts(name, shape)), shape)
        elif node["op_type"] == "aten.embedding.default" and tied:
            tokens, shape = node["inputs"][1], node["outputs"][0]["shape"]
            picked = {}
            for part, value in declared(head.parts(_EMBEDDING, node["inputs"][0]["shape"])).items():
                name, size = f"picked_{part}", [*tokens["shape"], value["shape"][1]]
                result = value | {"name": name, "shape": size}
                attrs = {"_tensor_list_sizes": [1]}
                op = "aten.index.Tensor"
                nodes.append(
                    {"name": name, "op_type": op, "inputs": [value, tokens], "outputs": [result], "attrs": attrs}
                )
                picked[part] = result | {"producer_node": name, "producer_output_idx": 0}
            numbers(node["name"], head, picked, shape)
            continue
        nodes.append(node)
    read = {by_name.get(value["name"]) for node in nodes for value in node["inputs"]}
    made |= {"nodes": nodes, "weights": [weight for name, weight in weights.items() if name in read]}
    made["weight_name_mapping"] = {placeholder: name for placeholder, name in by_name.items() if name in read}
    return made


def random_weights(ir: Mapping[str, Any], bits: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Seeded tensors for a graph: codes of any bits, and numbers of the size that they have in a trained model.

    Args:
        ir: The graph.
        bits: Of the codes, by the name of their tensor.
    """
    random, made = torch.Generator().manual_seed(0), {}
    largest = max(1 << 28, *(prod(weight["shape"]) for weight in ir["weights"]))
    noise = torch.randint(0, 256, (largest + 1,), generator=random, dtype=torch.uint8)
    for number, weight in enumerate(ir["weights"]):
        name, shape, size = weight["name"], weight["shape"], prod(weight["shape"])
        first = number * 4099 % (largest + 1 - size)
        if weight["dtype"] in ("uint8", "int8", "float8_e4m3fn"):
            raw = noise[first : first + size].reshape(shape)
            raw = raw & 0xF7 if weight["dtype"] == "float8_e4m3fn" else raw  # no NaN
            made[name] = raw.view(getattr(torch, weight["dtype"]))
        elif name.endswith("scales"):
            spread = {4: 4.6, 8: 74.0}[bits[name]]
            made[name] = torch.full(shape, 0.02 / spread, dtype=torch.bfloat16)
        elif name == "codebook":
            made[name] = torch.linspace(-8, 8, 16).sign() * torch.linspace(-8, 8, 16).abs().pow(1.3) / 2
        elif name.endswith("norm.weight"):
            made[name] = torch.ones(shape, dtype=torch.bfloat16)
        elif len(shape) == 2:
            chunk = noise[first : first + size].reshape(shape)
            made[name] = (chunk.to(torch.bfloat16) - 127.5) * (0.02 / 74)
        else:
            made[name] = torch.randn(shape, generator=random).mul(0.02).to(getattr(torch, weight["dtype"]))
    return made


def scale_bits(ir: Mapping[str, Any]) -> dict[str, int]:
    """The bits of the codes that each tensor of scales belongs to."""
    names, found = ir["weight_name_mapping"], {}
    for node in ir["nodes"]:
        for value in node["inputs"] if node["op_type"] == "npu_codes.dequantize.default" else ():
            found[names.get(value["name"], "")] = node["attrs"]["bits"]
    return found


def inputs_of(ir: Mapping[str, Any], position: int) -> dict[str, torch.Tensor]:
    """Random tokens at a position, and a random cache, on the GPU."""
    random, made = torch.Generator("cuda").manual_seed(1), {}
    for value in ir["graph_inputs"]:
        name, shape = value["name"], value["shape"]
        if name == "tokens":
            made[name] = torch.randint(151_936, shape, generator=random, device="cuda")
        elif name == "positions":
            made[name] = position + torch.arange(shape[0], device="cuda")
        elif name == "last":
            count = int(made["tokens"].shape[1])
            made[name] = torch.arange(count - shape[0], count, device="cuda")
        elif value["dtype"] == "int8":
            made[name] = torch.randint(-127, 128, shape, generator=random, device="cuda", dtype=torch.int8)
        elif value["dtype"] == "float32":  # scales of codes, whose numbers are then of the size of a 16-bit cache's
            made[name] = torch.full(shape, 1 / 73, device="cuda")
        else:
            numbers = torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)
            is_coded = value["dtype"] == "float8_e4m3fn"
            made[name] = (numbers * 73).to(torch.float8_e4m3fn) if is_coded else numbers
    return made


def step_graph(folder: Path, name: str, kv_cache_dtype: str, sizes: str = "1.5B") -> dict[str, Any]:
    """The graph of a step, kept in a folder; extracted where it is not there yet.

    Args:
        folder: Of the graphs.
        name: ``decode_L`` for a cache of L positions; for N tokens and a cache of 2,048 ``prefill_N``, which gives the
            logits of the last one, and ``check_N``, which gives those of all.
        kv_cache_dtype: As `npu extract-llm` has it.
        sizes: Which of Qwen2.5's models.
    """
    parts = [name, *([] if kv_cache_dtype == "16" else [kv_cache_dtype]), *([] if sizes == "1.5B" else [sizes])]
    path = folder / f"{'_'.join(parts)}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    with no_init_weights():
        config = Qwen2Config(**_MODELS[sizes])
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    form, (kind, _, number) = row_form(kv_cache_dtype, torch.bfloat16), name.partition("_")
    count, length = (1, int(number)) if kind == "decode" else (int(number), _LENGTH)
    shapes = (made for shape in cache_shapes(model, length) for made in form.empty(shape))
    inputs: dict[str, Any] = {"tokens": torch.zeros(1, count, dtype=torch.long), "positions": torch.arange(count)}
    inputs["caches"] = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
    inputs |= {"last": torch.arange(0 if kind == "check" else count - 1, count)} if count > 1 else {}
    ir = npu_compiler.extract(CachedDecoder(model, form), inputs, model_name=name).ir
    path.write_text(json.dumps(ir))
    return ir


def plain_inputs(ir: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs of a graph whose cache is in 16 bits, given those of one whose cache may be codes and scales."""
    caches = [name for name in inputs if name.startswith("caches_")]
    plain = [value["name"] for value in ir["graph_inputs"] if value["name"].startswith("caches_")]
    if len(plain) == len(caches):
        return dict(inputs)
    pairs = zip(caches[::2], caches[1::2], strict=True)
    numbers = [(inputs[codes].float() * inputs[scales]).to(torch.bfloat16) for codes, scales in pairs]
    made = {name: tensor for name, tensor in inputs.items() if name not in caches}
    return {**made, **dict(zip(plain, numbers, strict=True))}


def dequantised(ir: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a graph with codes: the 16-bit weights that they stand for, by the names of the 16-bit graph."""
    names, made = ir["weight_name_mapping"], {}
    for node in ir["nodes"]:
        if not node["name"].startswith("numbers_"):
            continue
        given = {names[value["name"]].rpartition(".")[2]: weights[names[value["name"]]] for value in node["inputs"]}
        attrs = node["attrs"]
        options = [attrs[name] for name in ("bits", "columns", "group", "rows", "zero")]
        parts = [None if part is None else part.cuda() for part in map(given.get, ("codes", "scales", "zeros"))]
        book = given["codebook"].cuda() if "codebook" in given else None
        number = torch.ops.npu_codes.dequantize(*parts, None, book, *options, torch.bfloat16).cpu()
        made[names[node["inputs"][0]["name"]].removesuffix(".codes")] = number
    made[_HEAD] = made.get(_HEAD, made.get(_EMBEDDING))
    return made


def _row(
    named: Mapping[str, Any], ir: Mapping[str, Any], plain: Mapping[str, Any] | None, position: int, device: Device
) -> Iterator[dict[str, Any]]:
    """Figures of one format; the logits are compared with those of the step in 16 bits, if that is given."""
    tokens = ir["graph_inputs"][0]["shape"][1]
    weights, inputs = random_weights(ir, scale_bits(ir)), inputs_of(ir, position)
    program = npu_compiler.compile(dict(ir), "cuda", "bfloat16")
    executor, held = CUDAExecutor(program, device), load_weights(weights, program, device)

    def logits(executor: CUDAExecutor, held: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        given = {spec.name: inputs[spec.name] for spec in executor.plan.inputs}
        return from_dlpack(executor.run(given, held)[executor.plan.outputs[0].name]).float().clone()

    result = logits(executor, held, inputs)
    caches = [value for value in ir["graph_inputs"] if value["name"].startswith("caches_")]
    figures: dict[str, Any] = {**named, "cache": caches[0]["dtype"], "length": caches[0]["shape"][2]}
    figures |= {"tokens": tokens, "logits": ir["graph_outputs"][0]["shape"][1], "position": position}
    figures["launches"] = len(executor.plan.calls)
    figures["GB of weights"] = sum(weight.nbytes for weight in weights.values()) / 1e9
    figures |= cuda_timing.repeated_milliseconds(executor.replay, executor.stream)
    figures["GB of cache"] = sum(inputs[value["name"]].nbytes for value in caches) / 1e9
    if plain is not None and ir is not plain:
        exact = random_weights(plain, {}) | {name: value for name, value in weights.items() if "codes" not in name}
        exact |= dequantised(ir, weights) if any(name.endswith(".codes") for name in weights) else {}
        names = {weight["name"] for weight in plain["weights"]}
        other = npu_compiler.compile(dict(plain), "cuda", "bfloat16")
        chosen = {name: value for name, value in exact.items() if name in names}
        expected = plain_inputs(plain, inputs_of(ir, position))
        wanted = logits(CUDAExecutor(other, device), load_weights(chosen, other, device), expected)
        figures["r"] = cuda_timing.pearson(result.cpu().numpy(), wanted.cpu().numpy())
    notes = [note for note in executor.plan.notes if "stored as numbers" in note]
    yield figures | ({"notes": notes[0]} if notes else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True, help="where extracted graphs are kept")
    steps = ["decode_2048", "prefill_8", "check_8"]
    parser.add_argument("--steps", nargs="*", default=steps, metavar="NAME", help="what to time")
    parser.add_argument("--position", type=int, default=128, help="of the first token")
    parser.add_argument("--kv-cache-dtype", choices=("int8", "fp8", "16"), default="16", help="what the cache holds")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--no-check", action="store_true", help="do not compare logits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this file")
    parser.add_argument("--model", choices=list(_MODELS), default="1.5B", help="which of Qwen2.5's sizes")
    parser.add_argument("--prepare", action="store_true", help="fill the folder of graphs, and end")
    args = parser.parse_args()
    if args.prepare:
        for graph in args.steps:
            step_graph(args.graphs, graph, args.kv_cache_dtype, args.model)
        return
    device = Device("cuda")
    run = cuda_timing.empty_run(device, {}, False)
    for graph in args.steps:
        given = step_graph(args.graphs, graph, args.kv_cache_dtype, args.model)
        is_plain = args.kv_cache_dtype == "16"
        plain = given if is_plain or args.no_check else step_graph(args.graphs, graph, "16", args.model)
        for name in args.formats:
            form = FORMATS[name]
            ir = given if form is None else coded(given, *form, _MODELS[args.model]["tie_word_embeddings"])
            named = {"model": args.model, "format": name}
            for figures in _row(named, ir, None if args.no_check else plain, args.position, device):
                run["results"].append(figures)
                print(figures, flush=True)
            torch.cuda.empty_cache()
            cuda_timing.write_run(args.json, run, _KEYS)
    cuda_timing.print_table(run, _KEYS)


if __name__ == "__main__":
    main()
