"""What passes may know of ops that have no definition: a model that is divided runs them on the CPU."""

from __future__ import annotations

from npu_compiler.ops import convolution, lenses
from npu_compiler.ops.registry import unlowered
from npu_compiler.ops.traits import Memory

unlowered("view_as_complex", "view_as_real", memory=Memory.OPERAND, lenses=lenses.paired)
unlowered("real", memory=Memory.OPERAND, lenses=lenses.complex_part(0))
unlowered("imag", memory=Memory.OPERAND, lenses=lenses.complex_part(1))
unlowered("view", memory=Memory.OPERAND, lenses=lenses.other_bits)  # as another data type
unlowered("matrix_H", memory=Memory.OPERAND)
unlowered("to", memory=Memory.OPERAND_OF_SAME_DTYPE, lenses=lenses.itself, unless="copy")
unlowered("conv_tbc", flops=convolution.flops)
unlowered("convolution_mode", "convolution_overrideable", flops=convolution.flops)
unlowered("nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique_consecutive", "unique2", dynamic=True)
