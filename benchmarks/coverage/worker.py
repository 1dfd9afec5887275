"""What runs in the process of one model; imported once, before processes are divided from it."""

from __future__ import annotations

import contextlib
import os
import warnings
from multiprocessing.connection import Connection

import torch
import torch._dynamo  # what torch.export imports when it is first called

from benchmarks.coverage.catalogue import catalogue
from benchmarks.coverage.trial import Request, try_model
from npu_cli.extras import import_torchvision

__all__ = ["work"]

with contextlib.suppress(ImportError):
    import_torchvision()
    import timm  # noqa: F401
    from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedModel  # noqa: F401, these take seconds


def work(name: str, request: Request, jobs: int, answers: Connection) -> None:
    """Sends the record of one model."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        record = try_model(catalogue()[name], request)
    answers.send(record)
    answers.close()
