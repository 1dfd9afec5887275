"""Launches that several small kernels share, against PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import npu_compiler
from npu_runtime import Device, load


class Rows(torch.nn.Module):
    """Rows of several tables: each kernel binds indices, a table, the result, and the record of faults."""

    def forward(self, tables: list[torch.Tensor], indices: list[torch.Tensor]) -> Any:
        return [torch.nn.functional.embedding(i, table) * 2 for table, i in zip(tables, indices, strict=True)]


def test_a_launch_binds_no_more_than_metal_has() -> None:
    """Records of faults were not counted: eight such kernels in one launch bound 32 buffers and parameters, of 31."""
    random = torch.Generator().manual_seed(0)
    tables = [torch.randn(5, 4, generator=random).half() for _ in range(8)]
    indices = [torch.randint(0, 5, (3,), generator=random) for _ in range(8)]
    extraction = npu_compiler.extract(Rows().eval(), (tables, indices))
    program = npu_compiler.compile(extraction, target="metal")
    given = load(program, extraction.weights, Device("software-metal"))(*tables, *indices)
    for made, wanted in zip(given, Rows()(tables, indices), strict=True):
        assert torch.equal(made, wanted)
