"""The function behind a step that chooses the next token, on memory that stays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.graph.next_token import next_token_ir
from npu_runtime import Device, Executor, NPUBuffer
from npu_text.sampling import Sampling, draw_inputs

__all__ = ["PLACES", "NextToken"]

PLACES = 6


class NextToken:
    """The choice for a vocabulary: greedy, or drawn."""

    def __init__(self, device: Device, vocabulary: int, drawn: bool = False) -> None:
        program = npu_compiler.compile(
            next_token_ir(vocabulary, "bfloat16", PLACES, drawn=drawn), device.target, "bfloat16"
        )
        self._executor, self._device = Executor(program, device), device
        self._specs = {spec.name: spec for spec in program.input_specs}
        assert dict(program.main.state) == {"all_chosen": "chosen"}

    def __call__(self, logits: NDArray[Any], position: int, sampling: Sampling | None = None) -> int:
        """The token, or `NO_NUMBER`, that follows the one at a position, after a look at what else is written."""
        arrays = {
            "logits": logits.astype(ml_dtypes.bfloat16).reshape(1, 1, -1),
            "positions": np.array([position]),
            "chosen": np.arange(PLACES) + 100,
        }
        arrays |= {} if sampling is None else draw_inputs(sampling)
        inputs = {
            name: NPUBuffer.from_numpy(array, self._device, spec=self._specs[name]) for name, array in arrays.items()
        }
        outputs = self._executor.run(inputs)
        assert outputs["all_chosen"].data is inputs["chosen"].data
        chosen = outputs["all_chosen"].to_numpy().tolist()
        token = int(chosen.pop(position))
        assert chosen == [100 + place for place in range(PLACES) if place != position]
        assert outputs["tokens"].to_numpy().item() == max(0, token), "which a step that runs ahead can look up"
        assert outputs["next_positions"].to_numpy().item() == position + 1
        return token
