"""`npu partition`: what of a model runs on the device, what on the CPU, and why."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

import npu_compiler
from npu_compiler.artifact.describe import format_bytes
from npu_compiler.partitioner import PartitionPlan
from npu_compiler.partitioning.ledger import alone_text, names_text
from npu_compiler.partitioning.plan import cpu_reasons, direction, endpoints, op_counts, side, summary

__all__ = ["execute"]


def execute(args: argparse.Namespace) -> int:
    plan = npu_compiler.partition(args.ir, target=args.target, device=args.device)
    if args.json:
        print(json.dumps(plan.to_dict(), indent=2))
        return 0
    console = Console(highlight=False, markup=False, emoji=False)  # names are not ours
    if not console.is_terminal:  # a file or a program reads it: nothing is cut or wrapped
        print(plan.report(), end="")
        return 0
    console.print(summary(plan))
    for table in (_partitions(plan), _transfers(plan), _reasons(plan), _prices(plan)):
        if table.row_count:
            console.print(table)
    return 0


def _partitions(plan: PartitionPlan) -> Table:
    table = Table("", "runs on", "nodes", "ops", title="partitions", title_justify="left")
    for part in plan.partitions:
        table.add_row(str(part.index), side(part), str(len(part.nodes)), op_counts(part))
    return table


def _transfers(plan: PartitionPlan) -> Table:
    table = Table("tensor", "direction", "partitions", "size", title="transfers", title_justify="left")
    for transfer in plan.transfers:
        table.add_row(transfer.tensor, direction(transfer), endpoints(transfer), format_bytes(transfer.nbytes))
    return table


def _reasons(plan: PartitionPlan) -> Table:
    table = Table("nodes", "op", "why it is on the CPU", title="on the CPU", title_justify="left")
    for op, reason, names in cpu_reasons(plan):
        table.add_row(names, op, reason)
    return table


def _prices(plan: PartitionPlan) -> Table:
    ledger = plan.ledger
    table = Table("ms", "moved", "nodes", "op", "way out", title="what that costs a run", title_justify="left")
    for cause in ledger.causes:
        remedy = f"{cause.way_out}; {alone_text(cause)}"
        nodes = f"{names_text(cause.nodes)} ({len(cause.all_nodes)} with those that follow)"
        table.add_row(f"{cause.milliseconds:.3f}", format_bytes(cause.nbytes), nodes, cause.op, remedy)
    if ledger.causes:
        table.add_section()
        table.add_row(f"{ledger.milliseconds:.3f}", format_bytes(ledger.nbytes), "all")
    return table
