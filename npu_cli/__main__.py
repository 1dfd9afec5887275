"""`python -m npu_cli`: the command `npu`, for the interpreter that is named."""

from __future__ import annotations

import sys

from npu_cli.main import main

sys.exit(main())
