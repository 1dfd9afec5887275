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
unlowered(
    "nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique_consecutive", "unique2",
    undefined="the shape of its result depends on the values of its operands, and shapes are static on the device",
)  # fmt: skip
unlowered(
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "multinomial",
    "normal", "normal_functional", "uniform", "random", "exponential", "geometric", "cauchy", "log_normal", "poisson",
    "binomial", "native_dropout", "rrelu_with_noise",
    undefined="its result is random, and the device draws no random numbers; draw them outside and make them an input",
)  # fmt: skip
unlowered(
    *(f"fft_{kind}fft{rank}" for kind in ("", "i", "r", "ir", "h", "ih") for rank in ("", "2", "n")),
    "fft_r2c", "fft_c2c", "fft_c2r", "stft", "istft",
    undefined=(
        "Fourier transforms run on the device as products: of at most 1024 points along a dimension, where their "
        "complex numbers become real ones inside of the model, by ops that have a spelling for pairs"
    ),
)  # fmt: skip
