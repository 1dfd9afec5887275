"""The choice of the next token by the device that gave its logits."""

from __future__ import annotations

import numpy as np

from npu_compiler.graph.next_token import NO_NUMBER, next_token_ir
from npu_runtime.backend import BoundPlan
from npu_runtime.buffer import NPUBuffer
from npu_text.language_model import LanguageModel
from npu_text.sampling import Sampler, not_a_number
from npu_text.step_functions import Tensor, device_buffer, visible

__all__ = ["StepChoice"]


class StepChoice:
    """Chooses the tokens of one text; the host reads them where both see them."""

    def __init__(self, model: LanguageModel, sampler: Sampler) -> None:
        draws, spec = sampler.sampling.temperature > 0, model.spec
        self._executor = model.beside(next_token_ir, spec.vocabulary, spec.dtype, spec.cache_length, draws)
        inputs = {each.name: each for each in self._executor.plan.inputs}
        self._outputs = {each.name: each for each in self._executor.plan.outputs}
        self._read, chosen = visible(model.device, inputs["chosen"])
        settings = {"limits": sampler.limits, "top_k": sampler.top_k, "seeds": sampler.seeds} if draws else {}
        self._inputs = {"chosen": chosen} | {
            name: NPUBuffer.from_numpy(array, model.device, spec=inputs[name]) for name, array in settings.items()
        }

    def made(self) -> dict[str, NPUBuffer]:
        """Memory for what `bind` writes: ``tokens`` [1, 1] and ``next_positions`` [1], int64."""
        return {name: device_buffer(self._inputs["chosen"].device, self._outputs[name]) for name in _FED_BACK}

    def bind(self, logits: NPUBuffer, positions: NPUBuffer, made: dict[str, NPUBuffer]) -> BoundPlan:
        """A choice to be recorded behind a step, of its position and logits."""
        return self._executor.bind({"logits": logits, "positions": positions, **self._inputs}, made)

    def choose(self, logits: Tensor, position: int) -> int:
        """The token that follows the one at a position, chosen at once.

        Raises:
            DeviceError: The logits are no numbers.
        """
        self._executor.run({"logits": logits, "positions": np.array([position]), **self._inputs})
        return self.chosen_after(position)

    def chosen_after(self, position: int) -> int:
        """The token that a choice which has run found to follow the one at a position.

        Raises:
            DeviceError: The logits were no numbers.
        """
        token = int(self._read[position])
        if token == NO_NUMBER:
            raise not_a_number("no number")
        return token


_FED_BACK = ("tokens", "next_positions")
