"""What passes may know of ops that have no definition: a model that is divided runs them on the CPU."""

from __future__ import annotations

from npu_compiler.ops import attention, convolution
from npu_compiler.ops.registry import unlowered
from npu_compiler.ops.traits import Memory

unlowered("adjoint", "as_strided", "diagonal", "H", "imag", "mH", "mT", "real", "swapdims", "T", memory=Memory.OPERAND)
unlowered("unfold", "view_as_complex", "view_as_real", memory=Memory.OPERAND)
unlowered("to", memory=Memory.OPERAND_OF_SAME_DTYPE)
unlowered("conv_tbc", "convolution_mode", "convolution_overrideable", flops=convolution.flops)
unlowered(
    "scaled_dot_product_cudnn_attention",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_for_cpu",
    "scaled_dot_product_fused_attention_overrideable",
    "scaled_dot_product_attention_math",
    flops=attention.flops,
)
unlowered("embedding_bag", is_learned=True)
