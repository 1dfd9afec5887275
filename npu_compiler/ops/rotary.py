"""The rotary embedding's angles, where PyTorch's export hid them in one opaque node."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.dtypes import FLOAT32
from npu_compiler.ops.indexing import cat
from npu_compiler.ops.registry import op
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply


@op("wrap_with_set_grad_enabled", takes_angle=True)
def rotary_angles(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., S, 2F] of positions [..., S] times inverse frequencies [F], twice side by side.

    `torch.export` makes this node of a rotary embedding that runs under ``no_grad``; the IR does not say what is
    inside, so anything but one vector of frequencies and one tensor of whole positions is refused. Angles are float32.
    """
    frequencies = [t for t in tensors if t.dtype.is_float and len(t.shape) == 1]
    positions = [t for t in tensors if t.dtype.is_integer]
    if len(tensors) != 2 or len(frequencies) != 1 or len(positions) != 1:
        raise OpRefusal(
            "it is no rotary embedding; extract the model with npu_compiler.extract, which opens such nodes"
        )
    where = positions[0].reshape((*positions[0].shape, 1)).cast(FLOAT32)
    angles = where * frequencies[0].cast(FLOAT32)
    both = cat([angles, angles], -1)
    return apply("cos", both), apply("sin", both)
