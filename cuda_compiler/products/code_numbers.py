"""The numbers of packed codes in memory, made by a launch ahead of the product that reads them."""

from __future__ import annotations

from cuda_compiler.dialect import CUDA
from cuda_compiler.products.grouped_matvec import part_inputs, part_macros, part_rows
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.problems.forms import GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.expr import Ref
from npu_compiler.tensor.layout import Layout
from npu_compiler.tensor.trace import Map, TracedTensor

__all__ = ["CODE_FILES", "CODE_NUMBERS", "numbers_ahead"]

CODE_FILES = "tensor_cores.cuh grouped_codes.cuh scaled_codes.cuh code_groups.cuh"
"""What kernels build on that make numbers of packed codes in their order."""

_THREADS, _OCTETS = 256, 4  # of a block, and of eight codes that a thread has; as in the kernel's file

CODE_NUMBERS = KernelTemplate(
    "code_numbers",
    params="int outputs, octets, matrix_row, scale_row, zero_row, bias_row",
    macros="vector_t scale_t zero_t bias_t codebook_t COMMON BITS GROUP ONE_GROUP ROWS SCALE_GROUP ZERO_GROUP "
    "BIAS_GROUP CODE_KIND FLOAT_MANTISSA FLOAT_SCALE CODEBOOK ZEROS ZERO_BITS ZERO BIASES",
    inputs="matrix scales zeros biases entries",
    outputs="out",
    threads=_THREADS,
    files=CODE_FILES,
)


def numbers_ahead(found: Product, lowering: Lowering) -> tuple[Product, KernelCall]:
    """The product of numbers that a launch of its own has made, and that launch.

    Args:
        found: A product whose right matrix is in packed codes, whole octets a row, which `loads_packed` has looked at.
        lowering: Where the trace's tensors are.
    """
    codes, dtype, octets = found.b.operand, found.a.dtype, found.n * found.k // 8
    assert isinstance(codes, GroupedCodes)
    shape = codes.shape
    place = lowering.scratch(found.n * found.k * dtype.size)
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    tensor = TracedTensor(place, codes.tensor.name, shape, dtype, Layout(shape, shape, order), "plain", Map(codes.expr))
    launch = Launch(
        CODE_NUMBERS,
        grid=(ceil_div(octets, _OCTETS * _THREADS), 1, 1),
        values={"outputs": found.n, "octets": octets, "matrix_row": found.b.along, **part_rows(codes)},
        macros={
            **part_macros(codes, dtype),
            "vector_t": CUDA.storage[dtype.name],
            "COMMON": found.k,
            "GROUP": codes.group,
            "ONE_GROUP": 0,
        },
        inputs=part_inputs(codes),
        outputs={"out": Argument(place, writes=True)},
    )
    nbytes = found.n * found.k * dtype.size + octets * codes.bits
    call = KERNELS.launch_alone(launch, f"numbers of {codes.tensor.name}", nbytes, lowering)
    return found.with_operand(1, Operand(tensor, Ref(place, tensor.view))), call
