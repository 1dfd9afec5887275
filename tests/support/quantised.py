"""Tiny language models as quantised checkpoints, and the same models in PyTorch with the numbers that these mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from npu_compiler.integers import ceil_div
from tests.support.decoders import Decoder, config, import_transformers

__all__ = ["Encoded", "Encoder", "as_array", "bit_stream", "extracted", "half", "write_checkpoint"]

Array = NDArray[Any]
Encoded = tuple[Mapping[str, torch.Tensor], torch.Tensor]
"""Tensors by their names' ends, behind the module's path, and the numbers that they mean, in float32."""

Encoder = Callable[[str, torch.Tensor], Encoded | None]
"""Quantises the weight [rows, columns] of a module; None to leave it plain."""


def bit_stream(numbers: Array, bits: int, word: int = 32) -> Array:
    """Integers along the last dimension as words of so many bits, by Python's own integers: slow and plain."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    count = ceil_div(rows.shape[1] * bits, word)
    made = np.zeros((rows.shape[0], count), np.uint64)
    for row, own in zip(made, rows, strict=True):
        stream = sum(int(number) << (place * bits) for place, number in enumerate(own))
        row[:] = [stream >> (place * word) & ((1 << word) - 1) for place in range(count)]
    return made.astype(f"u{word // 8}").reshape(*numbers.shape[:-1], count)


def as_array(tensor: torch.Tensor) -> Array:
    """A tensor as numpy has it, bfloat16 and 8-bit floats included."""
    kind = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    if kind is None:
        return tensor.numpy()
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16).numpy().view(kind)


def half(weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Rounded to a half precision, in float32."""
    return weight.to(kind).float()


def write_checkpoint(
    folder: Path, section: Mapping[str, Any], encode: Encoder, kind: torch.dtype, family: str = "Qwen2", **options: Any
) -> Any:
    """Writes a quantised checkpoint of a model with seeded weights.

    Args:
        folder: Where to; made where it does not exist.
        section: What the configuration says of the quantisation: entries of ``config.json``.
        encode: Quantises each linear and each embedding.
        kind: The half precision of all else.
        family: See `decoders.config`.
        options: Likewise.

    Returns:
        The model in PyTorch, with the numbers that the checkpoint means, in float32.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    made = config(family, **options)
    torch.manual_seed(3)
    model = import_transformers().AutoModelForCausalLM.from_config(made).eval().float()
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.2 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.normal_(0.0 if parameter.ndim > 1 else 0.8, spread, generator=generator)
            parameter.copy_(half(parameter, kind))
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or weight is None:
                continue
            if name == "lm_head" and made.tie_word_embeddings:
                continue
            encoded = encode(name, weight.detach().clone())
            if encoded is not None:
                tensors |= {f"{name}.{end}": tensor.contiguous() for end, tensor in encoded[0].items()}
                weight.copy_(encoded[1])
                weight.was_encoded = True
        for name, parameter in model.named_parameters():
            if not getattr(parameter, "was_encoded", False):
                tensors[name] = parameter.to(kind).contiguous()
    save_file(tensors, folder / "model.safetensors")
    content = made.to_dict() | {"dtype": str(kind).removeprefix("torch."), **section}
    content["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(content))
    return model


def extracted(source: Path, model: Any, target: Path, **options: Any) -> Decoder:
    """What extraction makes of a checkpoint, beside the model that it means."""
    from npu_compiler.frontend.language_model import extract_language_model

    extract_language_model(source, target, cache_length=64, prefill=options.pop("prefill", (16,)), **options)
    return Decoder(target, model)
