"""What nodes on the CPU cost, why they are there, and what would end it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from npu_cli.main import main
from npu_compiler import extract, partition
from npu_compiler.ops.registry import definition
from npu_compiler.partitioner import PartitionPlan
from npu_model import DAGExecutor
from npu_runtime import Device
from tests.support.extraction import Function

# Ops that have no definition; if one gets one, another takes its place.
QR, EXPONENTIAL = "aten.linalg_qr.default", "aten.matrix_exp.default"


def two_causes(x: torch.Tensor) -> torch.Tensor:
    rotation, _ = torch.linalg.qr(x @ x)
    small = torch.matrix_exp((x[:2] @ x)[:, :2])
    result: torch.Tensor = (x + rotation) @ x + small.sum()
    return result


def divided(function: object = two_causes, size: int = 64) -> PartitionPlan:
    return partition(extract(Function(function), (torch.ones(size, size),)).ir)


def accepts(others: set[str], op: str) -> bool:
    return op not in others


def test_these_ops_have_no_definition() -> None:
    assert definition(QR) is None
    assert definition(EXPONENTIAL) is None


def test_each_node_on_the_cpu_belongs_to_one_cause() -> None:
    plan = divided()
    listed = [node.name for cause in plan.ledger.causes for node in cause.all_nodes]
    on_cpu = [name for part in plan.partitions if not part.on_device for name in part.nodes]
    assert sorted(listed) == sorted(on_cpu)
    assert {cause.op for cause in plan.ledger.causes} == {QR, EXPONENTIAL}


def test_prices_add_up_and_are_in_order() -> None:
    plan = divided()
    prices = [cause.milliseconds for cause in plan.ledger.causes]
    assert prices == sorted(prices, reverse=True)
    assert plan.ledger.milliseconds == pytest.approx(sum(prices))
    own = {"args_0", *plan.output_tensors}
    crossing = sum(transfer.nbytes for transfer in plan.transfers if transfer.tensor not in own)
    assert plan.ledger.nbytes == crossing


def test_a_node_is_charged_with_what_crosses_for_it() -> None:
    (cause,) = (cause for cause in divided().ledger.causes if cause.op == QR)
    assert cause.nbytes == 2 * 2 * 64 * 64  # the product in float16 to the host, the rotation back


def test_what_a_cause_brings_back_alone_is_what_defining_it_brings() -> None:
    plan = divided()
    for cause in plan.ledger.causes:
        ir = extract(Function(two_causes), (torch.ones(64, 64),)).ir
        others = {other.op for other in plan.ledger.causes} - {cause.op}
        without = partition(ir, partial(accepts, others))
        on_device = sum(len(part.nodes) for part in without.partitions if part.on_device)
        before = sum(len(part.nodes) for part in plan.partitions if part.on_device)
        assert cause.returns == on_device - before
        assert cause.saves == plan.bytes_moved - without.bytes_moved


def test_an_op_without_definition_is_to_be_defined() -> None:
    (cause,) = divided(lambda x: torch.matrix_exp(x @ x)).ledger.causes
    assert cause.reason == "no definition of this op is registered"
    assert cause.way_out.startswith(f"define {EXPONENTIAL}")


def test_a_data_type_that_would_lower_is_named() -> None:
    plan = partition(extract(Function(lambda x: x @ x), (torch.ones(256, 256, dtype=torch.float64),)).ir)
    assert [cause.way_out for cause in plan.ledger.causes] == ["compute it in float32"]


def test_what_a_callback_refuses_although_it_lowers() -> None:
    ir = extract(Function(lambda x: torch.relu(x @ x)), (torch.ones(64, 64),)).ir
    (cause,) = partition(ir, lambda op: op != "aten.relu.default").ledger.causes
    assert cause.way_out == "it lowers: let is_op_supported accept it"


def test_a_model_on_the_device_costs_nothing() -> None:
    ledger = divided(lambda x: torch.relu(x @ x)).ledger
    assert (ledger.causes, ledger.nbytes, ledger.milliseconds) == ((), 0, 0)


def test_measured_times_take_the_place_of_derived_ones() -> None:
    plan = divided()
    executor = DAGExecutor(plan, Device("software-metal"))
    times = executor.cpu_milliseconds({"args_0": torch.ones(64, 64) / 64}, runs=1)
    assert times.keys() == {part.index for part in plan.partitions if not part.on_device}
    ledger = plan.with_measured(times).ledger
    computing = sum(node.computing_ms for cause in ledger.causes for node in cause.all_nodes)
    assert ledger.measured
    assert computing == pytest.approx(sum(times.values()))
    assert ledger.nbytes == plan.ledger.nbytes


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    extract(Function(two_causes), (torch.ones(64, 64),), path)
    assert main(["partition", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = partition(path)
    assert found == plan.to_dict()
    assert found["on_cpu"]["bytes"] == sum(cause["bytes"] for cause in found["on_cpu"]["causes"])
    assert {"op", "reason", "way_out", "bytes", "milliseconds", "alone", "nodes"} == found["on_cpu"]["causes"][0].keys()
