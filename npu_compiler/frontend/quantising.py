"""`quantise_checkpoint`: a checkpoint of Hugging Face in half precision to one of few bits, weight by weight.

Integers and 8-bit floats are written as compressed-tensors has them, NormalFloat as bitsandbytes has it: formats that
`checkpoints` reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from npu_compiler.artifact.output_file import same_file, write_file
from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array
from npu_compiler.frontend.checkpoints.formats import importer_of
from npu_compiler.frontend.checkpoints.importer import group_size
from npu_compiler.frontend.checkpoints.packing import pack
from npu_compiler.frontend.checkpoints.rounding import (
    NF4,
    Rounded,
    round_to_codebook,
    round_to_floats,
    round_to_integers,
)
from npu_compiler.frontend.checkpoints.tensors import SafetensorsFolder
from npu_compiler.frontend.coded_layers import as_tensor
from npu_compiler.frontend.decoder_request import WEIGHTS, configuration
from npu_compiler.frontend.weight_file import write_json, write_weights

__all__ = ["QuantisedLayer", "quantise_checkpoint"]

_BITS = {"int8": 8, "int4": 4}
_HALVES = ("bfloat16", "float16")
_FLOATS = (*_HALVES, "float32")
_WORD = 4  # bytes

Tell = Callable[["QuantisedLayer", float], None]


@dataclass(frozen=True)
class QuantisedLayer:
    """What became of a weight.

    Attributes:
        name: The module's path.
        form: What it is stored in.
        before, after: Bytes.
        error: The norm of the difference over the norm of the weight.
    """

    name: str
    form: str
    before: int
    after: int
    error: float


def quantise_checkpoint(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    weights: str,
    group: int | None = None,
    head: str = "int8",
    tell: Tell = lambda layer, done: None,
) -> list[QuantisedLayer]:
    """Rounds the linears of a causal language model to codes; norms and biases stay as they are.

    It holds what it writes, and one weight in float32.

    Args:
        source: A folder with ``config.json`` and ``.safetensors`` files.
        folder: Where to write; made where it does not exist.
        weights: ``int8``, ``int4``, ``fp8`` or ``nf4``.
        group: Columns that share a scale; all of a row when None. ``fp8`` takes no other.
        head: What the output layer and the embedding are stored in: ``int8``, a scale for each row; or ``16``.
        tell: Called for each weight that is rounded, with the part of all weights that is done.

    Returns:
        What became of each weight that was rounded.

    Raises:
        ExtractionError: The source is no such folder, or is quantised already; a group does not divide a row; a weight
            is not finite; or the folder cannot be written.
    """
    origin, target = Path(source), Path(folder)
    content = configuration(origin)
    if importer_of(content) is not None:
        raise ExtractionError(f"given '{origin}', which is quantised already; expected weights in half precision")
    if target.exists() and same_file(origin, target):
        raise ExtractionError(f"cannot write to '{folder}': the weights are read from it; choose another folder")
    _check_options(weights, group, head)
    tensors = SafetensorsFolder(origin)
    modules = _modules(origin)
    made: dict[str, torch.Tensor] = {}
    layers: list[QuantisedLayer] = []
    names = sorted(tensors.names())
    for place, name in enumerate(names):
        module = name.removesuffix(".weight")
        is_head = modules.get(module)
        form = None if is_head is None else (None if head == "16" else head) if is_head else weights
        given = tensors.take(name)
        if form is None:
            made[name] = as_tensor(given)
            continue
        parts, layer = _rounded(module, given, form, None if is_head else group)
        made.update({f"{module}.{end}": as_tensor(part) for end, part in parts.items()})
        layers.append(layer)
        tell(layer, (place + 1) / len(names))
    section = _section(weights, group, [name for name, is_head in modules.items() if is_head], head)
    try:
        target.mkdir(parents=True, exist_ok=True)
        _copy_others(origin, target)
    except OSError as error:
        raise ExtractionError(f"cannot write to '{folder}': {error.strerror}; choose another folder") from error
    write_weights(target / WEIGHTS, made)
    write_json(target / "config.json", {**content, "quantization_config": section})
    return layers


def _check_options(weights: str, group: int | None, head: str) -> None:
    if weights not in (*_BITS, "fp8", "nf4") or head not in ("int8", "16"):
        raise ExtractionError(
            f"given weights={weights!r} and head={head!r}, expected int8, int4, fp8 or nf4, and int8 or 16"
        )
    if weights == "fp8" and group is not None:
        raise ExtractionError(f"given groups of {group} for fp8, expected a scale for each row; leave the group out")
    if weights == "nf4" and (group is None or head != "16"):
        raise ExtractionError("given nf4 with whole rows or an int8 head, expected a group, and the head in 16 bits")


def _modules(source: Path) -> dict[str, bool]:
    """The paths of the model's linears and embeddings, and whether each is the output layer or an embedding."""
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExtractionError(
            f"given '{source}', expected a causal language model of Hugging Face: {reason}"
        ) from error
    head = model.get_output_embeddings()
    return {
        name: module is head or isinstance(module, torch.nn.Embedding)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }


def _rounded(module: str, given: Array, form: str, group: int | None) -> tuple[Mapping[str, Array], QuantisedLayer]:
    """The tensors of a weight, by their names' ends."""
    name = f"{module}.weight"
    if given.ndim != 2 or given.dtype.name not in _FLOATS:
        raise ExtractionError(
            f"'{name}': given {given.dtype.name}{list(given.shape)}, expected a matrix in half precision"
        )
    norm = float(np.square(given.astype(np.float32)).sum(dtype=np.float64))
    if not np.isfinite(norm):
        raise ExtractionError(f"'{name}': given numbers that are infinite or NaN, expected finite ones")
    columns = given.shape[1]
    own = group_size(name, group or -1, columns)
    kind = given.dtype if given.dtype.name in _HALVES else np.dtype(ml_dtypes.bfloat16)
    if form == "nf4":
        result = round_to_codebook(given, own, NF4)
        parts = _as_bitsandbytes(given.shape, result, own)
    elif form == "fp8":
        result = round_to_floats(given, kind)
        parts = {"weight": result.codes, "weight_scale": result.scales}
    else:
        symmetric = form == "int8"
        result = round_to_integers(given, _BITS[form], own, kind, symmetric)
        is_plain = symmetric and own == columns
        parts = (
            {"weight": result.codes, "weight_scale": result.scales} if is_plain else _packed(given.shape, form, result)
        )
    shown = form if form == "fp8" or own == columns else f"{form} in groups of {own}"
    after = sum(part.nbytes for part in parts.values())
    return parts, QuantisedLayer(module, shown, given.nbytes, after, sqrt(result.error / norm) if norm else 0.0)


def _packed(shape: tuple[int, ...], form: str, result: Rounded) -> dict[str, Array]:
    """Integers in words of 32 bits, as compressed-tensors packs them."""
    bits = _BITS[form]
    codes = result.codes.view(np.uint8) ^ np.uint8(128) if result.codes.dtype == np.int8 else result.codes
    parts = {
        "weight_packed": _words(pack(codes, bits)),
        "weight_scale": result.scales,
        "weight_shape": np.array(shape, np.int64),
    }
    if result.zeros is not None:
        parts["weight_zero_point"] = np.ascontiguousarray(_words(pack(np.ascontiguousarray(result.zeros.T), bits)).T)
    return parts


def _words(stream: Array) -> Array:
    """Rows of bytes as integers of 32 bits, filled up with zeros."""
    padded = np.pad(stream, ((0, 0), (0, -stream.shape[1] % _WORD)))
    return np.ascontiguousarray(padded).view("<i4")


def _as_bitsandbytes(shape: tuple[int, ...], result: Rounded, group: int) -> dict[str, Array]:
    flat = result.codes.reshape(-1)
    state = {"quant_type": "nf4", "blocksize": group, "dtype": "bfloat16", "shape": list(shape)}
    return {
        "weight": ((flat[0::2] << np.uint8(4)) | flat[1::2]).reshape(-1, 1),
        "weight.absmax": result.scales.reshape(-1),
        "weight.quant_map": NF4,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8).copy(),
    }


def _section(weights: str, group: int | None, heads: list[str], head: str) -> dict[str, Any]:
    """What the configuration says of the result."""
    if weights == "nf4":
        section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
        return section | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}
    groups = {"group_0": _group(["Linear"], weights, group)}
    if head != "16":
        groups["group_1"] = _group(heads, head, None)
    formats = {entry["format"] for entry in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": heads if head == "16" else [],
    }


def _group(targets: list[str], form: str, group: int | None) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": _BITS.get(form, 8), "type": "float" if form == "fp8" else "int"}
    weights |= {"symmetric": form != "int4", "strategy": "channel" if group is None else "group"}
    weights |= {} if group is None else {"group_size": group}
    if form == "fp8":
        format_ = "float-quantized"
    else:
        format_ = "int-quantized" if form == "int8" and group is None else "pack-quantized"
    return {"targets": targets, "weights": weights, "input_activations": None, "format": format_}


def _copy_others(source: Path, folder: Path) -> None:
    """Copies the tokenizer and what else is told in text."""
    for path in sorted(source.iterdir()):
        is_text = path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json")
        if path.is_file() and is_text and path.name != "config.json":
            write_file(folder / path.name, path.read_bytes(), [path], ExtractionError)
