"""How probable a prompt's own tokens are, from logits on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_compiler.compiler import compile
from npu_compiler.graph.lane_tokens import token_scores_ir
from npu_runtime.backend import BoundPlan
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.workspace import Workspace
from npu_text.batching.engine import Chosen
from npu_text.sampling import not_a_number
from npu_text.step_functions import visible

__all__ = ["BoundScores", "TokenScorer"]


class TokenScorer:
    """Scores given tokens. What does so is compiled when it is first asked for."""

    def __init__(self, device: Device, kind: str) -> None:
        """Prepares nothing yet.

        Args:
            device: Where logits are.
            kind: Data type of the logits.
        """
        self._device, self._kind = device, kind
        self._executors: dict[tuple[int, ...], Executor] = {}
        self._workspace = Workspace(device.backend)  # calls come one after another

    def bind(self, logits: NPUBuffer) -> BoundScores:
        """Scores by the logits in a buffer [..., V], right behind what makes them."""
        executor = self._executors.get(logits.shape)
        if executor is None:
            ir = token_scores_ir(logits.shape, self._kind)
            program = compile(ir, self._device.target, ir["compute_dtype"])
            executor = self._executors[logits.shape] = Executor(program, self._device, workspace=self._workspace)
        return BoundScores(self._device, executor, logits)


class BoundScores:
    """The scores of tokens by the logits in one buffer. Calls of `put`, runs of the plan and `read` follow one another.

    Attributes:
        plan: To be run, or recorded, behind what makes the logits.
    """

    def __init__(self, device: Device, executor: Executor, logits: NPUBuffer) -> None:
        """Takes what `TokenScorer.bind` prepared."""
        specs = {spec.name: spec for spec in (*executor.plan.inputs, *executor.plan.outputs) if spec.name != "logits"}
        both = {name: visible(device, spec) for name, spec in specs.items()}
        memory = {name: buffer for name, (_, buffer) in both.items()}
        self.plan: BoundPlan = executor.bind(
            {"logits": logits, "given": memory["given"]},
            {spec.name: memory[spec.name] for spec in executor.plan.outputs},
        )
        self._memory = memory  # stays as long as the plan
        self._views = {name: view for name, (view, _) in both.items()}
        self._views["given"][...] = 0
        self._tokens: Sequence[int] = ()
        self._best = 0

    def put(self, tokens: Sequence[int], best: int) -> None:
        """Says which tokens to score, one by each of the first rows, and how many of the likeliest to tell beside."""
        self._tokens, self._best = tokens, best
        self._views["given"][: len(tokens)] = tokens

    def read(self) -> tuple[Chosen, ...]:
        """What a run that has been waited for gave, for each token of `put`.

        Raises:
            DeviceError: The logits of a row are no numbers.
        """
        count, best = len(self._tokens), self._best
        logprobs = self._views["logprobs"][:count]
        if np.isnan(logprobs).any():
            raise not_a_number()
        likeliest = (self._views[name][:count, :best].tolist() for name in ("best", "best_logprobs"))
        return tuple(
            Chosen(token, logprob, tuple(zip(*each, strict=True)))
            for token, logprob, *each in zip(self._tokens, logprobs.tolist(), *likeliest, strict=True)
        )
