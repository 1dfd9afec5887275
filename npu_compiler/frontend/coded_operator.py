"""The operators ``npu_codes::dequantize`` and ``npu_codes::quantize`` in PyTorch: what `npu_compiler.ops.codes` and
`row_codes` define for the compiler, computed.

Importing it makes the operators known, as a model's export and its parts on the CPU need them.
"""

from __future__ import annotations

from typing import Any

import torch

from npu_compiler.integers import ceil_div

__all__: list[str] = []

_CHUNK = 1 << 21  # numbers that are made at a time


torch.library.define(
    "npu_codes::dequantize",
    "(Tensor codes, Tensor scales, Tensor? zeros, Tensor? biases, Tensor? codebook, int bits, int columns, int group, "
    "int rows, int zero, ScalarType dtype) -> Tensor",
)


@torch.library.impl("npu_codes::dequantize", "CompositeExplicitAutograd")
def _dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    biases: torch.Tensor | None,
    codebook: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """As `npu_compiler.ops.codes.dequantize`; in float64 where the scales are. It makes some rows at a time."""
    columns, rows, dtype = options[1], options[3], options[5]
    result = codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)
    if codes.ndim != 2:
        return result.copy_(_made(codes, scales, zeros, biases, codebook, *options))
    step = max(1, _CHUNK // (rows * columns)) * rows  # whole blocks
    for start in range(0, codes.shape[0], step):
        part, groups = slice(start, start + step), slice(start // rows, (start + step) // rows)
        others = [None if other is None else other[groups] for other in (scales, zeros, biases)]
        result[part] = _made(codes[part], *others, codebook, *options)
    return result


def _made(
    codes: torch.Tensor,
    scales: Any,
    zeros: torch.Tensor | None,
    biases: torch.Tensor | None,
    codebook: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """The numbers of codes, in float32 or in the scales' float64."""
    bits, columns, group, rows, zero, _ = options
    exact = torch.promote_types(scales.dtype, torch.float32)
    height = codes.shape[-2] if codes.ndim > 1 else 1

    def over_groups(tensor: torch.Tensor) -> torch.Tensor:
        if rows > 1:
            tensor = tensor.repeat_interleave(rows, -2)[..., :height, :]
        tensor = tensor.to(exact)
        return tensor if tensor.shape[-1] == 1 else tensor.repeat_interleave(group, -1)[..., :columns]

    numbers = _numbers(codes, bits, columns)
    made = numbers.to(exact) if codebook is None else codebook.to(exact)[numbers.int()]
    if zeros is not None:
        made -= over_groups(_numbers(zeros, bits, ceil_div(columns, group)))
    elif zero:
        made -= zero
    made *= over_groups(scales)
    if biases is not None:
        made += over_groups(biases)
    return made


def _shaped(codes: torch.Tensor, *others: Any) -> torch.Tensor:
    columns, dtype = others[5], others[-1]
    return codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)


torch.library.register_fake("npu_codes::dequantize", _shaped)


def _numbers(codes: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The codes of each row, one by one."""
    if bits == 8:
        return codes
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        parts = torch.stack([(codes >> shift) & mask for shift in range(0, 8, bits)], -1)
        return parts.flatten(-2)[..., :count]
    first = torch.arange(count, device=codes.device) * bits
    byte = first >> 3
    word = codes[..., byte].to(torch.int32)
    word |= codes[..., (byte + 1).clamp(max=codes.shape[-1] - 1)].to(torch.int32) << 8
    return (word >> (first & 7)) & ((1 << bits) - 1)


torch.library.define("npu_codes::quantize", "(Tensor input, ScalarType dtype) -> (Tensor, Tensor)")


@torch.library.impl("npu_codes::quantize", "CompositeExplicitAutograd")
def _quantize(input: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `npu_compiler.ops.row_codes.quantize`; in float64 where the input is."""
    exact = torch.promote_types(input.dtype, torch.float32)
    most = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
    scales = (input.to(exact).abs().amax(-1, keepdim=True) * (1 / most)).clamp(min=1e-12)
    codes = input.to(exact) * (1 / scales)
    return (codes.round() if dtype == torch.int8 else codes.clamp(-most, most)).to(dtype), scales


def _quantized(input: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    exact = torch.promote_types(input.dtype, torch.float32)
    return input.new_empty(input.shape, dtype=dtype), input.new_empty((*input.shape[:-1], 1), dtype=exact)


torch.library.register_fake("npu_codes::quantize", _quantized)
