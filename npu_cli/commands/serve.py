"""`npu serve`: a model for clients of the OpenAI API."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from npu_cli.progress import PREPARING, waiting
from npu_compiler.errors import InputError
from npu_runtime import Device
from npu_text.batching.texts import Limits
from npu_text.serving.server import ServerOptions, open_app, run
from npu_text.serving.several import open_front

__all__ = ["execute"]

_PORTS = 1 << 16


def execute(args: argparse.Namespace) -> int:
    if not 0 <= args.port < _PORTS:
        raise InputError(f"given --port {args.port}, expected 0 to {_PORTS - 1}")
    options = ServerOptions(
        name=args.name or "",
        keys=tuple(args.api_key),
        body=args.max_body,
        patience=args.patience,
        temperature=args.temperature,
        limits=Limits(waiting=args.queue, chunk=args.chunk),
    )
    devices = (args.device or "").split(",")
    with ExitStack() as stack:
        with waiting(PREPARING):
            if len(devices) > 1:
                app = stack.enter_context(open_front(args.folder, devices, options))
            else:
                app = open_app(args.folder, Device(args.device), options)
        run(app, args.host, args.port, lambda address: print(f"{address} serves {args.folder}", flush=True))
    return 0
