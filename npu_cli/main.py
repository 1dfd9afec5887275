"""Entry point of the console command `npu`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from npu_cli.parser import build_parser

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when all went well, 1 after an error, 130 after an interrupt. A wrong command line exits with 2.
    """
    parsed = build_parser().parse_args(arguments)
    # A command's module, and all that it imports, is loaded only when it runs.
    command = import_module(f"npu_cli.commands.{parsed.command.replace('-', '_')}")
    from npu_compiler.errors import NPUError

    try:
        status: int = command.execute(parsed)
        sys.stdout.flush()
    except NPUError as error:
        if parsed.debug:
            raise
        _print_error(str(error))
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return status


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), (message, "red"))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
