"""Quantises weights as the producers of each format do, by their descriptions; each gives what its tensors mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from npu_compiler.frontend.checkpoints.small_floats import E2M1
from npu_compiler.integers import ceil_div
from tests.support.quantised import Array, Encoded, bit_stream

__all__ = ["integers_of", "pack_quantized", "gptq"]


def integers_of(weight: torch.Tensor, bits: int, group: int, kind: torch.dtype) -> tuple[Array, torch.Tensor, Array]:
    """Codes from 0 on [rows, columns], scales [rows, groups] of a half precision, zero points [rows, groups]."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // group, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    top = (1 << bits) - 1
    scales = ((high - low) / top).to(kind)
    zeros = (-low / scales.float()).round().clamp(0, top)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.reshape(rows, columns).numpy().astype(np.uint8), scales, zeros.numpy().astype(np.uint8)


def means(codes: Array, scales: torch.Tensor, zeros: Any, group: int) -> torch.Tensor:
    """``(code - zero) * scale``, rounded once, to the scales' precision."""
    points = np.repeat(zeros, group, 1) if isinstance(zeros, np.ndarray) else zeros
    exact = (codes.astype(np.float64) - points) * np.repeat(scales.double().numpy(), group, 1)
    return torch.from_numpy(exact).to(scales.dtype).float()


def words(numbers: Array, bits: int) -> torch.Tensor:
    return torch.from_numpy(bit_stream(numbers, bits).view(np.int32).copy())


def pack_quantized(weight: torch.Tensor, bits: int, group: int, symmetric: bool, kind: torch.dtype) -> Encoded:
    """compressed-tensors' packed integers."""
    codes, scales, zeros = integers_of(weight, bits, group, kind)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if symmetric:
        return tensors, means(codes, scales, 1 << (bits - 1), group)
    tensors["weight_zero_point"] = words(np.ascontiguousarray(zeros.T), bits).T.contiguous()
    return tensors, means(codes, scales, zeros, group)


def gptq(
    weight: torch.Tensor, bits: int, group: int, kind: torch.dtype, first: bool = True, order: Array | None = None
) -> Encoded:
    """GPTQ's integers; `order` says which group each column belongs to, in turns of a permutation."""
    columns = weight.shape[1]
    turn = np.arange(columns) if order is None else order
    codes, scales, zeros = integers_of(weight[:, turn], bits, group, kind)
    meant = torch.empty_like(weight)
    meant[:, turn] = means(codes, scales, zeros, group)
    own = np.empty_like(codes)
    own[:, turn] = codes
    groups = np.empty(columns, np.int32)
    groups[turn] = np.arange(columns) // group
    stored = (zeros.astype(np.int64) - first) & ((1 << bits) - 1)
    tensors = {
        "qweight": words(own, bits).T.contiguous(),
        "qzeros": words(np.ascontiguousarray(stored.T), bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups),
    }
    return tensors, meant


AWQ_TURNS = [0, 2, 4, 6, 1, 3, 5, 7]  # the column of each place of a word, from its low bits on


def awq(weight: torch.Tensor, group: int, kind: torch.dtype, version: str = "gemm") -> Encoded:
    """AutoAWQ's integers of four bits."""
    rows = weight.shape[0]
    codes, scales, zeros = integers_of(weight, 4, group, kind)
    meant = means(codes, scales, zeros, group)
    if version == "gemv":
        width = ceil_div(zeros.shape[1], 8)
        points, padded = np.zeros((rows, 8 * width), np.uint8), torch.zeros(rows, 8 * width, dtype=kind)
        points[:, : zeros.shape[1]], padded[:, : zeros.shape[1]] = zeros, scales
        return {"qweight": words(codes, 4), "qzeros": words(points, 4), "scales": padded}, meant

    def turned(numbers: Array) -> torch.Tensor:
        own = numbers.reshape(numbers.shape[0], -1, 8)[..., AWQ_TURNS].reshape(numbers.shape)
        return words(np.ascontiguousarray(own), 4)

    tensors = {"qweight": turned(codes.T), "qzeros": turned(zeros.T), "scales": scales.T.contiguous()}
    return tensors, meant


def block_fp8(weight: torch.Tensor, block: tuple[int, int], kind: torch.dtype) -> Encoded:
    """8-bit floats with a scale for each block; those at the edges are smaller."""
    rows, columns = weight.shape
    scales = torch.zeros(ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[place] = codes[place].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, meant.to(kind).float()


def mlx(weight: torch.Tensor, bits: int, group: int, kind: torch.dtype) -> Encoded:
    """MLX's integers: a scale and a bias for each group."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, group)
    biases = groups.amin(-1).to(kind)
    scales = ((groups.amax(-1) - biases.float()) / ((1 << bits) - 1)).to(kind)
    codes = ((groups - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, (1 << bits) - 1)
    meant = (codes.double() * scales.double()[..., None] + biases.double()[..., None]).reshape(rows, columns)
    packed = bit_stream(codes.reshape(rows, columns).numpy().astype(np.uint8), bits)
    tensors = {"weight": torch.from_numpy(packed.view(np.int32).copy()).view(torch.uint32)}
    return tensors | {"scales": scales, "biases": biases}, meant.to(kind).float()


def _nearest(numbers: Array) -> Array:
    """The code of the nearest float of four bits."""
    codes: Array = np.abs(numbers[..., None] - E2M1.astype(np.float64)).argmin(-1).astype(np.uint8)
    return codes


def _pairs(codes: Array) -> torch.Tensor:
    return torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << np.uint8(4))


def mxfp4(weight: torch.Tensor) -> Encoded:
    """compressed-tensors' floats of four bits in groups of 32, whose scales are powers of two."""
    groups = weight.double().numpy().reshape(weight.shape[0], -1, 32)
    powers = np.floor(np.log2(np.abs(groups).max(-1).clip(2.0**-100))) - 2
    scales = np.exp2(powers)[..., None]
    codes = _nearest(groups / scales)
    meant = torch.from_numpy((E2M1[codes] * scales).reshape(weight.shape)).float()
    stored = torch.from_numpy((powers + 127).astype(np.uint8))
    return {"weight_packed": _pairs(codes.reshape(weight.shape)), "weight_scale": stored}, meant


def nvfp4(weight: torch.Tensor) -> Encoded:
    """Model Optimizer's floats of four bits in groups of 16, whose scales are 8-bit floats by a number for all."""
    groups = weight.double().reshape(weight.shape[0], -1, 16)
    whole = (groups.abs().max() / (448 * 6)).float()
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    wide = (scales.double() * whole.double())[..., None].numpy()
    codes = _nearest(groups.numpy() / wide)
    meant = torch.from_numpy((E2M1[codes] * wide).reshape(weight.shape)).float()
    tensors = {"weight": _pairs(codes.reshape(weight.shape)), "weight_scale": scales, "weight_scale_2": whole}
    return tensors, meant
