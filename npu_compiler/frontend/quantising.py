"""`quantise_checkpoint`: a checkpoint of Hugging Face in half precision to one of few bits, weight by weight.

Integers and 8-bit floats are written as compressed-tensors has them, NormalFloat as bitsandbytes has it: formats that
`checkpoints` reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
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
from npu_compiler.frontend.calibration import Calibration, Rounding, Seen, calibrate, logits_of, observe
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
from npu_compiler.frontend.decoder_source import load_decoder
from npu_compiler.frontend.weight_file import write_json, write_weights

__all__ = ["LogitsChange", "QuantisedLayer", "change_of_logits", "quantise_checkpoint"]

_BITS = {"int8": 8, "int4": 4}
_HALVES = ("bfloat16", "float16")
_FLOATS = (*_HALVES, "float32")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
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
        outputs: The same of what the layer gives for the inputs of a text; None without one.
    """

    name: str
    form: str
    before: int
    after: int
    error: float
    outputs: float | None = None


@dataclass(frozen=True)
class LogitsChange:
    """How far the logits of a text lie from those of the unquantised model.

    Attributes:
        tokens: Of the text.
        correlation: The lowest Pearson r of a position.
        largest: The largest change of a logit.
        same: The part of positions whose likeliest token is the same.
        before, after: The mean cross-entropy of the text's next tokens, in nats.
    """

    tokens: int
    correlation: float
    largest: float
    same: float
    before: float
    after: float


def quantise_checkpoint(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    weights: str,
    group: int | None = None,
    head: str = "int8",
    tell: Tell = lambda layer, done: None,
    method: str = "rtn",
    text: Sequence[Sequence[int]] = (),
) -> list[QuantisedLayer]:
    """Rounds the linears of a causal language model to codes; norms and biases stay as they are.

    It holds what it writes, and one weight in float32; with a text, the whole model in float32 as well.

    Args:
        source: A folder with ``config.json`` and ``.safetensors`` files.
        folder: Where to write; made where it does not exist.
        weights: ``int8``, ``int4``, ``fp8`` or ``nf4``.
        group: Columns that share a scale; all of a row when None. ``fp8`` takes no other.
        head: What the output layer and the embedding are stored in: ``int8``, a scale for each row; or ``16``.
        tell: Called for each weight that is rounded, with the part of all weights that is done.
        method: ``rtn``; or ``search``, which moves scales from weights into what makes their inputs (`calibration`),
            and weighs errors by these inputs.
        text: Rows of tokens by which layers are judged; ``search`` needs some.

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
    if method not in ("rtn", "search") or (method == "search" and not text):
        raise ExtractionError(
            f"given method={method!r} and {len(text)} rows of a text, expected rtn, or search with a text"
        )
    tensors = SafetensorsFolder(origin)
    modules = _modules(origin)
    plain = [name for name, is_head in modules.items() if not is_head]
    judged = _judged(origin, plain, weights, group, method, text) if text else Calibration({})
    unknown = sorted(set(judged.changed).difference(tensors.names()))
    if unknown:
        raise ExtractionError(
            f"'{unknown[0]}' is missing from the checkpoint, where the model has it; use --method rtn"
        )
    made: dict[str, torch.Tensor] = {}
    layers: list[QuantisedLayer] = []
    names = sorted(tensors.names())
    for place, name in enumerate(names):
        module = name.removesuffix(".weight")
        is_head = modules.get(module)
        form = None if is_head is None else (None if head == "16" else head) if is_head else weights
        given = tensors.take(name)
        fitted = judged.changed.get(name, given)
        if form is None:
            made[name] = as_tensor(given if fitted is given else fitted.astype(given.dtype))
            continue
        seen = None if is_head else judged.seen.get(module)
        importance = seen.square.numpy() if seen is not None and method == "search" else None
        parts, layer = _rounded(module, given, form, None if is_head else group, (fitted, seen, importance))
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


def _judged(
    origin: Path, modules: Sequence[str], weights: str, group: int | None, method: str, text: Sequence[Sequence[int]]
) -> Calibration:
    """What a text tells of the linears of a model."""
    model = load_decoder(origin, None, 0)
    kind = np.dtype(str(model.dtype).removeprefix("torch.")) if model.dtype == torch.float16 else _BFLOAT16
    model = model.float()
    tokens, known = max(max(row) for row in text), model.get_input_embeddings().num_embeddings
    if tokens >= known or min(min(row) for row in text) < 0:
        raise ExtractionError(
            f"given the token {tokens}, expected ids from 0 to {known - 1}; use the model's tokenizer"
        )
    if method == "rtn":
        return Calibration(observe(model, text)[0])

    def rounding(name: str) -> Rounding:
        own = group_size(f"{name}.weight", group or -1, model.get_submodule(name).in_features)

        def round_(weight: Array, importance: Array) -> Array:
            return _round(weight, weights, own, kind, importance, fits=False).numbers(NF4 if weights == "nf4" else None)

        return round_

    linears = [name for name in modules if isinstance(model.get_submodule(name), torch.nn.Linear)]
    return calibrate(model, text, {name: rounding(name) for name in linears})


def change_of_logits(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], text: Sequence[Sequence[int]]
) -> LogitsChange:
    """Compares a quantised model with the one that it was made of, in PyTorch.

    Args:
        source, folder: As for `quantise_checkpoint`.
        text: Rows of tokens.
    """
    model = load_decoder(Path(source), None, 0)
    own = [*logits_of(model, text)]
    model = load_decoder(Path(folder), None, 0)
    correlation, largest, same, entropies = 1.0, 0.0, 0, [0.0, 0.0]
    count = sum(map(len, text))
    for tokens, before, after in zip(text, own, logits_of(model, text), strict=True):
        centred = [logits - logits.mean(-1, keepdim=True) for logits in (before, after)]
        both = (centred[0] * centred[1]).sum(-1) / (centred[0].norm(dim=-1) * centred[1].norm(dim=-1))
        correlation = min(correlation, float(both.min()))
        largest = max(largest, float((after - before).abs().max()))
        same += int((after.argmax(-1) == before.argmax(-1)).sum())
        for place, logits in enumerate((before, after)):
            wanted = torch.tensor(list(tokens)[1:])
            entropies[place] += float(torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="sum"))
    following = max(1, count - len(text))
    return LogitsChange(count, correlation, largest, same / count, entropies[0] / following, entropies[1] / following)


def _round(
    weight: Array, form: str, group: int, kind: np.dtype[Any], importance: Array | None = None, fits: bool = True
) -> Rounded:
    if form == "nf4":
        return round_to_codebook(weight, group, NF4)
    if form == "fp8":
        return round_to_floats(weight, kind)
    return round_to_integers(weight, _BITS[form], group, kind, form == "int8", importance, fits)


def _rounded(
    module: str, given: Array, form: str, group: int | None, judged: tuple[Array, Seen | None, Array | None]
) -> tuple[Mapping[str, Array], QuantisedLayer]:
    """The tensors of a weight, by their names' ends.

    Args:
        module: Whose weight it is.
        given: As the checkpoint has it.
        form: What it becomes.
        group: Columns that share a scale.
        judged: What is rounded in its place, the layer's inputs, and how much each column counts.
    """
    name = f"{module}.weight"
    if given.ndim != 2 or given.dtype.name not in _FLOATS:
        raise ExtractionError(
            f"'{name}': given {given.dtype.name}{list(given.shape)}, expected a matrix in half precision"
        )
    fitted, seen, importance = judged
    norm = float(np.square(fitted.astype(np.float32)).sum(dtype=np.float64))
    if not np.isfinite(norm):
        raise ExtractionError(f"'{name}': given numbers that are infinite or NaN, expected finite ones")
    columns = given.shape[1]
    own = group_size(name, group or -1, columns)
    kind = given.dtype if given.dtype.name in _HALVES else _BFLOAT16
    result = _round(fitted, form, own, kind, importance)
    if form == "nf4":
        parts = _as_bitsandbytes(given.shape, result, own)
    elif form == "fp8" or (form == "int8" and own == columns):
        parts = {"weight": result.codes, "weight_scale": result.scales}
    else:
        parts = _packed(given.shape, form, result)
    shown = form if form == "fp8" or own == columns else f"{form} in groups of {own}"
    after = sum(part.nbytes for part in parts.values())
    error = sqrt(result.error / norm) if norm else 0.0
    outputs = None
    if seen is not None:
        outputs = seen.error(fitted.astype(np.float32), result.numbers(NF4 if form == "nf4" else None))
    return parts, QuantisedLayer(module, shown, given.nbytes, after, error, outputs)


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
