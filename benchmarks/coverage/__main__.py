"""How far models come: ``python -m benchmarks.coverage --device cuda --jobs 14``.

Builds models of torchvision, timm and transformers by name with seeded weights, takes each through extract, partition,
compile and run in a process of its own, and compares with PyTorch in float32. Records are kept as they come, so that a
run that was stopped goes on where it was: ``--results`` names the file. ``--until partition`` needs no device.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.coverage.catalogue import catalogue
from benchmarks.coverage.records import read_records, write_records
from benchmarks.coverage.sums import refusals_text, sums_text
from benchmarks.coverage.trial import STAGES, Request
from benchmarks.coverage.workers import try_models
from npu_runtime.device import device_names

_LIBRARIES = ("torch", "torchvision", "timm", "transformers")


def main() -> None:
    args = _arguments()
    names = list(catalogue(args.only))
    run, records = ({}, {}) if args.results is None else read_records(args.results)
    described = _run_described(args)
    if run and run != described and args.again and not args.only:
        records = {}
    elif run and run != described:
        remedy = "--again without --only, or another file"
        raise SystemExit(f"'{args.results}' is of another run, {run}, this one is {described}: {remedy}")
    started, left = monotonic(), [name for name in names if args.again or name not in records]
    print(f"{len(names)} models, {len(names) - len(left)} of them recorded before", flush=True)
    request = Request(args.device, args.until, args.ir)
    random.Random(0).shuffle(left)  # so that a part of a run says something of the whole
    for count, record in enumerate(try_models(left, request, args.jobs, args.limit), 1):
        records[record["name"]] = record
        if args.results is not None:
            write_records(args.results, described, records)
        print(f"[{count}/{len(left)}, {monotonic() - started:.0f} s] {_line(record)}", flush=True)
    chosen = [records[name] for name in names]
    print(refusals_text(chosen))
    print(sums_text(chosen))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="software-metal", choices=device_names(), help="where models run")
    parser.add_argument("--until", default="run", choices=STAGES, help="the last stage; only the last needs the device")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=180, help="seconds that one model may take")
    parser.add_argument("--only", default="", help="models whose name contains this; several with commas")
    parser.add_argument("--results", type=Path, help="file of records, which a later run adds to")
    parser.add_argument("--again", action="store_true", help="also those that the file of records has")
    parser.add_argument("--ir", type=Path, help="folder where IRs are kept, for what stops before running")
    return parser.parse_args()


def _run_described(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": args.device,
        "until": args.until,
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _line(record: Mapping[str, Any]) -> str:
    words = [record["name"], record["status"]]
    if "nodes_on_device" in record:
        words.append(f"{record['nodes_on_device']} of {record['nodes']} nodes on the device")
        words.append(f"{record['partitions']} partitions")
    if "r" in record:
        words.append(f"r {record['r']:.5f}")
    if isinstance(record.get("error"), Mapping):
        words.append(f"{record['error']['type']}: {record['error']['message']}")
    return ", ".join(words)


if __name__ == "__main__":
    main()
