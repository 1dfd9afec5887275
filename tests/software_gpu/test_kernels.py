"""Sample kernels against numpy, every way of running them against the fibers, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from software_gpu.checks import find_problems
from tests.software_gpu.harness import Array, floats, pipeline, read_kernels, run, uints

KINDS = ["fast", "reversed", "check"]


@dataclass(frozen=True)
class Case:
    """A dispatch; the last array is the output, `expected` what numpy makes of the others in double."""

    source: str
    kernel: str
    arguments: list[Array | bytes]
    expected: Array
    groups: tuple[int, int, int]
    threads: tuple[int, int, int]
    form: str
    grid: tuple[int, int, int] | None = None

    def run(self, kind: str) -> Array:
        source = read_kernels(self.source)
        return run(source, self.kernel, self.arguments, self.groups, self.threads, kind=kind, grid=self.grid)[-1]


def halves(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float16)


def softmax(x: Array) -> Array:
    wide = x.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def rms_norm(x: Array, weight: Array) -> Array:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * weight)


def max_pool(x: Array) -> Array:
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2]
    return np.asarray(windows.max(axis=(3, 4)))


def cases() -> dict[str, Case]:
    x, weight = halves(9, 300), halves(300)
    a, b = halves(100, 96), halves(72, 96)
    matrix, vector = halves(50, 256), halves(256)
    image, long = halves(3, 20, 24), halves(1000)
    product = a.astype(np.float64) @ b.astype(np.float64).T
    row_params, sizes = uints(300) + floats(1e-6), uints(100, 72, 96)
    blank_rows, blank_product = np.zeros((9, 300), np.float16), np.zeros((100, 72), np.float16)
    pool_params = uints(20, 24, 10, 12, 3, 2, 1)
    return {
        "softmax": Case(
            "rows", "softmax_rows", [x, blank_rows, row_params], softmax(x), (9, 1, 1), (256, 1, 1), "region"
        ),
        "rms_norm": Case(
            "rows",
            "rms_norm_rows",
            [x, weight, blank_rows, row_params],
            rms_norm(x, weight),
            (9, 1, 1),
            (256, 1, 1),
            "region",
        ),
        "matmul_simdgroup": Case(
            "matmul",
            "matmul_simdgroup",
            [a, b, blank_product, sizes],
            np.maximum(product, 0),
            (2, 2, 1),
            (128, 1, 1),
            "region",
        ),
        "matmul_tiled": Case(
            "matmul",
            "matmul_tiled",
            [a, b.T.copy(), blank_product, sizes],
            product,
            (2, 2, 1),
            (16, 16, 1),
            "region",
        ),
        "matvec": Case(
            "matmul",
            "matvec",
            [matrix, vector, np.zeros(50, np.float16), uints(50, 1, 256)],
            matrix.astype(np.float64) @ vector.astype(np.float64),
            (7, 1, 1),
            (256, 1, 1),
            "region",
        ),
        "silu": Case(
            "pointwise",
            "silu",
            [long, np.zeros(1000, np.float16), uints(1000)],
            long / (1 + np.exp(-long.astype(np.float64))),
            (4, 1, 1),
            (256, 1, 1),
            "loop",
        ),
        "add4": Case(
            "pointwise",
            "add4",
            [long, long[::-1].copy(), np.zeros(1000, np.float16)],
            long.astype(np.float64) + long[::-1],
            (1, 1, 1),
            (64, 1, 1),
            "loop",
            grid=(250, 1, 1),
        ),
        "max_pool": Case(
            "pointwise",
            "max_pool",
            [image, np.zeros((3, 10, 12), np.float16), pool_params],
            max_pool(image),
            (1, 2, 3),
            (16, 8, 1),
            "loop",
        ),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_numpy(name: str) -> None:
    case = CASES[name]
    assert case.form in pipeline(read_kernels(case.source), case.kernel).kernel.entries
    np.testing.assert_allclose(case.run("fast").astype(np.float64), case.expected, atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_every_way_of_running_gives_the_same_bits(name: str, kind: str) -> None:
    case = CASES[name]
    np.testing.assert_array_equal(case.run(kind).view(np.uint16), case.run("fibers").view(np.uint16))


@pytest.mark.parametrize("source", ["rows", "matmul", "pointwise"])
def test_checks_find_nothing_in_correct_kernels(source: str) -> None:
    assert find_problems(read_kernels(source)) == []
