"""A model as an application of Ray Serve: replicas, each a process with a device of its own, behind one address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_compiler.errors import MissingDependencyError
from npu_runtime.device import Device
from npu_text.serving.server import ServerOptions, app_of, open_model, prefer_texts

__all__ = ["Replica", "openai_app"]

_LEAVE_SECONDS = 40  # for a replica to end: its texts have 30


class Replica:
    """One replica: a model on a device of the machine that it runs on. Serve calls its methods."""

    def __init__(self, folder: str, device: str | None, options: ServerOptions) -> None:
        """As `openai_app` says; runs where the replica does."""
        self._options = options
        self._model = open_model(Path(folder), Device.of(device), options)
        prefer_texts()

    async def __serve_build_asgi_app__(self) -> Any:
        return app_of(self._model, self._options)

    def check_health(self) -> None:
        """Serve starts another replica in the place of one whose device failed.

        Raises:
            DeviceError: It did.
        """
        self._model.check()


def openai_app(
    folder: str | os.PathLike[str],
    device: str | None = None,
    options: ServerOptions | None = None,
    **deployment: Any,
) -> Any:
    """An application for `ray.serve.run`: the whole server of ``npu serve``, in as many processes as it is told.

    Args:
        folder: What ``npu extract-llm --lanes`` made, or an encoder, by a path that every machine has.
        device: The device of each replica, by name; the best of its machine when omitted. Where Ray gives GPUs out
            (``ray_actor_options={"num_gpus": 1}``), each replica sees its own alone, as ``cuda``.
        options: How the model is served.
        deployment: Options of `ray.serve.deployment`: ``num_replicas``, ``autoscaling_config``, ``ray_actor_options``
            and others.

    Returns:
        A `ray.serve.Application`.

    Raises:
        MissingDependencyError: The extra ``ray`` is not installed.
    """
    try:
        from ray import serve

        from npu_text.serving.guard import GuardOptions
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"an application of Ray Serve needs the package '{error.name}', which is not installed; install the extra "
            "that has it: pip install 'npu-compiler[ray]'"
        ) from error
    folder, options = os.path.abspath(folder), options or ServerOptions()
    defaults: Mapping[str, Any] = {
        "name": options.name or Path(folder).name,
        # Serve's own is 5, for replicas that do one thing after the other. What is too much for one of ours it refuses.
        "max_ongoing_requests": GuardOptions().requests,
        "graceful_shutdown_timeout_s": _LEAVE_SECONDS,
    }
    replica = serve.deployment(serve.ingress()(Replica), **{**defaults, **deployment})
    return replica.bind(folder, device, options)
