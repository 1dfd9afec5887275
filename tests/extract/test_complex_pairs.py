"""Complex numbers inside of a model as pairs, and Fourier transforms as products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import npu_compiler
import npu_runtime
from npu_runtime import Device
from tests.partition.mixed import check_mixed
from tests.support.extraction import Function

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0)).half().float()
PAIRS = X.reshape(2, 5, 6, 2)


def as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.reshape(2, 5, 6, 2))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions as numbers of the unit circle."""
    angles = torch.outer(torch.arange(5.0), 10.0 ** (-torch.arange(6.0) / 6))
    turned = as_complex(x) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(2)


fft = torch.fft
WHOLE: dict[str, Callable[[torch.Tensor], Any]] = {
    "fft": lambda x: fft.fft(x).imag,
    "fft of more": lambda x: torch.view_as_real(fft.fft(x, n=15, dim=1, norm="ortho")),
    "fft of fewer": lambda x: fft.fft(x, n=7).real,
    "ifft": lambda x: torch.view_as_real(fft.ifft(as_complex(x))),
    "fft and back": lambda x: fft.ifft(fft.fft(x, dim=0) * 2, dim=0).real,
    "fft2": lambda x: torch.view_as_real(fft.ifft2(fft.fft2(x, norm="forward") + 0.5 * fft.fft2(x), norm="forward")),
    "fftn": lambda x: fft.fftn(x, dim=(1, 2)).real,
    "fftn of sizes": lambda x: fft.fftn(x, s=(4, 8)).abs(),
    "rfft": lambda x: fft.rfft(x, norm="ortho").abs(),
    "rfft of an odd size": lambda x: torch.view_as_real(fft.rfft(x, dim=1)),
    "irfft": lambda x: fft.irfft(fft.rfft(x) / 2),
    "irfft of an odd size": lambda x: fft.irfft(fft.rfft(x, dim=1).conj(), n=5, dim=1),
    "irfft of more": lambda x: fft.irfft(as_complex(x), n=16),
    "irfft of fewer": lambda x: fft.irfft(as_complex(x), n=6),
    "rfft2 and back": lambda x: fft.irfft2(fft.rfft2(x) * x.mean(), s=(5, 12)),
    "rfftn and back": lambda x: fft.irfftn(fft.rfftn(x, norm="ortho"), s=(2, 5, 12), norm="ortho"),
    "products": lambda x: torch.view_as_real(as_complex(x) * as_complex(x.flip(-1)) - as_complex(x).conj()),
    "real factors": lambda x: torch.view_as_real(x[..., :6] * as_complex(x) / x[..., 6:].abs().add(1)),
    "parts": lambda x: torch.complex(x, x[0]).angle() + torch.complex(x, x[0]).imag,
    "views": lambda x: torch.view_as_real(
        torch.cat([as_complex(x).transpose(-1, 0), as_complex(x).permute(2, 1, 0)], -1)[1:]
        .unsqueeze(1)[:, 0, 2]
        .clone()
    ),
    "rotary": rotated,
}


def entries(function: Callable[..., Any], *given: torch.Tensor) -> Any:
    return npu_compiler.extract(Function(function), given)


@pytest.mark.parametrize("name", WHOLE)
def test_equals_torch(name: str) -> None:
    function = WHOLE[name]
    try:
        extraction = entries(function, X)
        program = npu_compiler.compile(extraction, target="metal")
    except npu_compiler.errors.NPUError as error:
        pytest.fail(f"{error}")
    found = npu_runtime.load(program, extraction.weights, device="software-metal")(X)
    expected = function(X.double())
    torch.testing.assert_close(
        torch.as_tensor(found).double(), expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: fft.rfft(x),
        lambda x: fft.fft(x).exp().real,
        lambda x: (fft.fft(x) + 1).real,
        lambda x: torch.view_as_real(fft.fft(x).mul_(2)),
        lambda x: fft.fft(x.repeat(1, 1, 100)).real,
    ],
)
def test_what_has_no_spelling_stays_complex(function: Callable[[torch.Tensor], Any]) -> None:
    plan = check_mixed(Function(function), (X,), Device("software-metal"), target="metal")
    assert any("fft" in reason for part in plan.partitions for reason in part.reasons)


def test_a_part_that_leaves_the_model_does_not_keep_others_from_the_device() -> None:
    plan = npu_compiler.partition(entries(lambda x: (fft.fft(x).abs(), fft.rfft(x * 2)), X), target="metal")
    reasons = [reason for part in plan.partitions for reason in part.reasons]
    assert any("fft_rfft" in reason for reason in reasons)
    assert not any("fft_fft" in reason for reason in reasons)
