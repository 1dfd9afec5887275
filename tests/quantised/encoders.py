"""Quantises weights as the producers of each format do, by their descriptions; each gives what its tensors mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

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
    rows, columns = weight.shape
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
