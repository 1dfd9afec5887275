"""The choice of a text's next token from logits, which the device makes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from npu_compiler.graph.next_token import NO_NUMBER, next_token_ir
from npu_runtime.backend import BoundPlan
from npu_runtime.buffer import NPUBuffer
from npu_text.language_model import LanguageModel
from npu_text.sampling import Sampling, draw_inputs, not_a_number
from npu_text.step_functions import Tensor, device_buffer, visible

__all__ = ["TokenChoice"]


class TokenChoice:
    """The function behind a step that chooses the token which follows, and what was chosen at each position of a text.

    The host reads tokens where both see them.
    """

    def __init__(self, model: LanguageModel, sampling: Sampling) -> None:
        """Makes the function ready for one text."""
        spec, device, draws = model.spec, model.device, sampling.temperature > 0
        self._device = device
        self._executor = model.beside(next_token_ir, spec.vocabulary, spec.dtype, spec.cache_length, draws)
        inputs = {each.name: each for each in self._executor.plan.inputs}
        self._tokens, chosen = visible(device, inputs["chosen"])
        settings = draw_inputs(sampling) if draws else {}
        self._settings = {"chosen": chosen} | {
            name: NPUBuffer.from_numpy(array, device, spec=inputs[name]) for name, array in settings.items()
        }

    def choose(self, logits: Tensor, position: int) -> int:
        """The token that follows the one at a position, which gave these logits [1, 1, V], wherever they lie.

        Raises:
            DeviceError: The logits are no numbers.
        """
        self._executor.run({"logits": logits, "positions": np.array([position]), **self._settings})
        return self.chosen_after(position)

    def fed_back(self) -> dict[str, NPUBuffer]:
        """Memory for what the next step takes: ``tokens``, the token, and ``next_positions``, its position."""
        outputs = [each for each in self._executor.plan.outputs if each.name in ("tokens", "next_positions")]
        return {each.name: device_buffer(self._device, each) for each in outputs}

    def bind(self, logits: NPUBuffer, positions: NPUBuffer, outputs: Mapping[str, NPUBuffer]) -> BoundPlan:
        """The function on memory that stays; `outputs` is of `fed_back`."""
        return self._executor.bind({"logits": logits, "positions": positions, **self._settings}, outputs)

    def chosen_after(self, position: int) -> int:
        """The token that was chosen to follow the one at a position, by a step that has run.

        Raises:
            DeviceError: The logits were no numbers.
        """
        token = int(self._tokens[position])
        if token == NO_NUMBER:
            raise not_a_number()
        return token
