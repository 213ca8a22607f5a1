"""From the words of a command line to a plan; every wrong word is refused here in one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glm5_ascend.errors import PlanError
from glm5_ascend.plan.hardware import Cluster, Figure, Hardware, load_hardware
from glm5_ascend.plan.layouts import Options
from glm5_ascend.plan.model import PlannedModel, from_directory, named
from glm5_ascend.plan.result import Plan, make_plan
from glm5_ascend.plan.spending import NodeRates
from glm5_ascend.plan.workload import parse_acceptance, parse_slo, parse_workload

#: More machines than anyone has in one deployment: a typing error, and a search without end.
MOST_NODES = 4096


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of `glm5-ascend plan`, unchecked; see `glm5_ascend.plan.plan`."""

    directory: Path | None = None
    model: str | None = None
    quant: str = "w4a8"
    hardware: str = "a3"
    nodes: int = 1
    workload: str = "in=3500,out=1500,concurrency=16"
    mtp: int | None = None
    slo: str | None = None
    layout: str | None = None
    cache: str | None = None
    index_cache: bool = False
    seqs: int | None = None
    batched_tokens: int = 4096
    utilization: float = 0.95
    buffer_mb: int = 200
    acceptance: str | float | None = None
    price: float | None = None
    power: float | None = None
    imbalance: float = 1.0
    host_time: float = 1.0


def run(request: PlanRequest) -> Plan:
    """Check the request and make the plan."""
    hardware = load_hardware(request.hardware)
    if not 1 <= request.nodes <= MOST_NODES:
        raise PlanError(f"--nodes {request.nodes}: must be 1 to {MOST_NODES}", "correct --nodes")
    _check_numbers(request)
    hardware = _with_host(hardware, request.host_time)
    workload, slo = parse_workload(request.workload), parse_slo(request.slo)
    model = _model(request)
    if request.mtp and not model.config.num_nextn_predict_layers:
        raise PlanError(f"--mtp {request.mtp}: {model.name} has no MTP layer", "--mtp 0")
    if model.needs_fp8 and not hardware.fp8:
        asked = f"--quant {model.quantization}" if request.directory is None else f"{request.directory}: weights of FP8"
        fix = "--quant w8a8" if request.directory is None else "quantize it"
        raise PlanError(f"{asked}: {hardware.title} does not multiply FP8", f"{fix}, or --hardware ascend-950pr")
    drafts = 0 if not model.config.num_nextn_predict_layers else request.mtp
    options = Options(
        drafts,
        request.seqs,
        request.utilization,
        request.batched_tokens,
        request.buffer_mb,
        parse_acceptance(request.acceptance),
        request.imbalance,
    )
    price = hardware.price_per_node_hour if request.price is None else request.price
    power = hardware.power_watts
    if request.power is not None:
        power = Figure(value=request.power, quality="measured", source="--power-usage")
    rates = NodeRates(price, power)
    return make_plan(model, Cluster(hardware, request.nodes), workload, slo, options, request.layout, rates)


def _with_host(hardware: Hardware, times: float) -> Hardware:
    """The machine with another processor beside its dies, which takes so many times as long for the same launches."""
    if times == 1.0:
        return hardware
    known = hardware.pass_seconds_scale
    scale = Figure(value=times * known.value, quality="measured", source=f"--host-time {times:g}; {known.source}")
    return hardware.model_copy(update={"pass_seconds_scale": scale})


def _model(request: PlanRequest) -> PlannedModel:
    if request.directory is not None and request.model is not None:
        raise PlanError("both DIR and --model are given", "give one of them")
    if request.directory is not None:
        return from_directory(request.directory, request.cache, request.index_cache)
    return named(request.model or "glm-5", request.quant, request.cache, request.index_cache)


def _check_numbers(request: PlanRequest) -> None:
    for option, value, low, high in (
        ("--mtp", request.mtp, 0, 15),
        ("--seqs", request.seqs, 1, 100_000),
        ("--batched-tokens", request.batched_tokens, 1, 1_000_000),
        ("--utilization", request.utilization, 0.01, 1.0),
        ("--buffer-mb", request.buffer_mb, 0, 100_000),
        ("--price", request.price, 0.0, 1e9),
        ("--power-usage", request.power, 1.0, 1e6),
        ("--imbalance", request.imbalance, 1.0, 256.0),
        ("--host-time", request.host_time, 0.1, 10.0),
    ):
        if value is not None and not low <= value <= high:
            raise PlanError(f"{option} {value:g}: must be {low:g} to {high:g}", f"correct {option}")
