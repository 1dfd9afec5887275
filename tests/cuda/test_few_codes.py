"""Products of 2 to 16 rows by packed codes that come through shared memory: which take them, and what they compute.

What the kernel computes is seen on this machine's processor, thread by thread; on a GPU the cases of
`test_grouped_matvec` run it as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuda_compiler.products import few_codes
from cuda_compiler.products.few_codes_sizes import FewCodes
from tests.cuda.test_grouped_matvec import Case, inputs_of
from tests.cuda.test_integer_rows import errors_on_host
from tests.support.host_kernels import HAS_COMPILER

BFLOAT, HALF = torch.bfloat16, torch.float16

FORCED: list[tuple[Case, torch.dtype, FewCodes]] = [
    (Case(m=8, n=64, k=1024, bits=8, kind=torch.int8, group=1024), BFLOAT, FewCodes(4, 2, 2)),
    (Case(m=2, n=80, k=1024, zeros=True), BFLOAT, FewCodes(1, 3, 2)),
    (Case(m=16, n=48, k=1280, zeros=True, behind="residual"), BFLOAT, FewCodes(2, 4, 1)),
    (Case(m=5, n=48, k=1024, zeros=True, group=128), HALF, FewCodes(2, 2, 3)),
    (Case(m=9, n=32, k=384, zero=8, group=32), BFLOAT, FewCodes(8, 1, 2)),
    (Case(m=3, n=32, k=768, bits=8, zeros=True), BFLOAT, FewCodes(2, 2, 2)),
    (Case(m=8, n=64, k=768, bits=8, kind=torch.int8, group=128, behind="norm ahead"), BFLOAT, FewCodes(1, 3, 1)),
    (Case(m=4, n=64, k=512, zeros=True, behind="gated"), BFLOAT, FewCodes(8, 1, 2)),
    (Case(m=6, n=32, k=896, bits=8, zero=128, group=896), HALF, FewCodes(8, 1, 1)),
    (Case(m=8, n=80, k=2304, zeros=True, behind="residual"), BFLOAT, FewCodes(2, 2, 2, 4, early=1)),
    (Case(m=11, n=48, k=1280, bits=8, kind=torch.int8, group=1280), BFLOAT, FewCodes(3, 1, 1, 2)),
    (Case(m=7, n=32, k=1024, codebook=True), HALF, FewCodes(2, 2, 1)),
    (Case(m=6, n=32, k=768, bits=8, kind=torch.float8_e4m3fn, group=768), BFLOAT, FewCodes(1, 2, 2)),
    (Case(m=4, n=32, k=512, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(1, 4, 1)),
]
"""Among them tiles in turns, teams without one, rows that end within a step, shares of several sizes, clusters."""


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("case", "dtype", "sizes"), FORCED, ids=str)
def test_threads_on_the_processor_give_the_product(
    case: Case, dtype: torch.dtype, sizes: FewCodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(few_codes, "few_codes_sizes", lambda work, rows, values, device: sizes)
    error, rounding = errors_on_host(case, dtype, inputs_of(case, dtype)[0], tmp_path)
    assert error <= (3.0 if case.behind else 1.2) * rounding
