"""Numbers of packed codes, made by a launch of their own."""

from __future__ import annotations

from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import is_free
from cuda_compiler.products.grouped_matvec import PART_INPUTS, PART_MACROS, part_inputs, part_macros, part_rows
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

__all__ = ["CODE_NUMBERS", "numbers_ahead"]

_THREADS = 256
_SPAN = 64  # codes that two threads make, four octets each; where groups or rows are no such spans, two octets each

CODE_NUMBERS = KernelTemplate(
    "code_numbers",
    params="int outputs, matrix_row, scale_row, zero_row, bias_row",
    macros=f"{PART_MACROS} vector_t COMMON GROUP ONE_GROUP OCTETS EARLY",
    inputs=PART_INPUTS,
    outputs="out",
    threads=_THREADS,
    files="tensor_cores.cuh grouped_codes.cuh scaled_codes.cuh",
)


def numbers_ahead(found: Product, lowering: Lowering) -> tuple[Product, KernelCall]:
    """The product of numbers that a launch of its own has made of the right matrix's codes, and that launch.

    All matrices of a size have their numbers in one place. So this can be written while the launch ahead still runs, on
    multiprocessors that it leaves idle, if nothing that runs reads it.
    """
    codes, dtype, count = found.b.operand, found.a.dtype, found.n * found.k
    assert isinstance(codes, GroupedCodes)
    shape, nbytes = codes.shape, count * dtype.size
    place, is_new = lowering.common_scratch(("numbers of codes", nbytes), codes.tensor.index, nbytes, everywhere=True)
    octets = 2 if found.k % _SPAN or (codes.group < found.k and codes.group % _SPAN) else 4
    early = not is_new and bool(lowering.ask(is_free, place))
    layout = Layout(shape, shape, (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))
    tensor = TracedTensor(place, codes.tensor.name, shape, dtype, layout, "plain", Map(codes.expr))
    launch = Launch(
        CODE_NUMBERS,
        grid=(ceil_div(count // (8 * octets), _THREADS), 1, 1),
        values={"outputs": found.n, "matrix_row": found.b.along, **part_rows(codes)},
        macros={
            **part_macros(codes, dtype),
            "vector_t": CUDA.storage[dtype.name],
            "COMMON": found.k,
            "GROUP": codes.group,
            "ONE_GROUP": 0,
            "OCTETS": octets,
            "EARLY": int(early),
        },
        inputs=part_inputs(codes),
        outputs={"out": Argument(place, writes=True)},
    )
    read = count * codes.bits // 8
    call = KERNELS.launch_alone(launch, f"numbers of {codes.tensor.name}", read + nbytes, lowering)
    return found.with_operand(1, Operand(tensor, Ref(place, tensor.view))), call
