"""What passes may know of ops that have no definition: a model that is divided runs them on the CPU."""

from __future__ import annotations

from npu_compiler.ops import convolution, linear
from npu_compiler.ops.registry import unlowered
from npu_compiler.ops.traits import Memory

unlowered("adjoint", "as_strided", "H", "imag", "mH", "mT", "real", "swapdims", "T", memory=Memory.OPERAND)
unlowered("view_as_complex", "view_as_real", memory=Memory.OPERAND)
unlowered("to", memory=Memory.OPERAND_OF_SAME_DTYPE)
unlowered("mv", "dot", flops=linear.flops)
unlowered("addbmm", flops=linear.flops_beside_sum)
unlowered("conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", flops=convolution.flops)
unlowered("convolution", "convolution_mode", "convolution_overrideable", flops=convolution.flops)
unlowered("nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique_consecutive", "unique2", dynamic=True)
