"""Every op case, and the sizes of `shapes`, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from npu_runtime import Device
from tests.cuda import shapes
from tests.ops import test_ops
from tests.ops.cases import Case
from tests.ops.collected import COMPUTED

BOTH = pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@BOTH
@pytest.mark.parametrize("case", [*shapes.CASES, *COMPUTED], ids=str)
def test_equals_torch(case: Case, compute: torch.dtype, device: Device) -> None:
    test_ops.check(case, torch.float32, compute, device)


@BOTH
@pytest.mark.parametrize("case", test_ops.HALF_MODELS, ids=str)
def test_equals_torch_in_a_half_precision_model(case: Case, compute: torch.dtype, device: Device) -> None:
    test_ops.check(case, compute, compute, device)
