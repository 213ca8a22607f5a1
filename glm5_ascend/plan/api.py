"""The function `plan`, which the command calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5_ascend.errors import PlanError
from glm5_ascend.options import with_options
from glm5_ascend.plan.hardware import Cluster, load_hardware
from glm5_ascend.plan.html import write
from glm5_ascend.plan.layout import MAX_DRAFTS
from glm5_ascend.plan.layouts import SearchOptions
from glm5_ascend.plan.model import PlannedModel, from_directory, named
from glm5_ascend.plan.options import PlanOptions
from glm5_ascend.plan.result import Plan, PlanCommands, make_plan
from glm5_ascend.plan.tails import tails
from glm5_ascend.plan.text import NO_COMMANDS, lines, show, to_json
from glm5_ascend.plan.workload import parse_acceptance, parse_slo, parse_workload

if TYPE_CHECKING:
    from rich.console import Console

#: More machines than any deployment has: a typing error, and a very long search.
MAX_NODES = 4096


@dataclass(frozen=True)
class PlanReport:
    """A plan, percentiles by name if the scheduler was simulated, and the commands that run the plan."""

    plan: Plan
    simulated: dict[str, float] | None = None
    commands: PlanCommands = NO_COMMANDS

    def lines(self) -> list[str]:
        """Lines for a terminal of 80 columns."""
        return lines(self.plan, self.simulated, commands=self.commands)

    def show(self, console: Console) -> None:
        """Print the report on a console, in its width."""
        show(self.plan, self.simulated, console, self.commands)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `--json`."""
        return to_json(self.plan, self.simulated, self.commands)


@with_options(PlanOptions)
def plan(options: PlanOptions) -> PlanReport:
    """Plan a deployment on paper: memory, layout, latency and throughput, each with a range.

    Raises:
        PlanError, ConfigError, CheckpointError: an option is wrong, or nothing fits.
    """
    hardware = load_hardware(str(options.hardware))
    for name, value, low, high in (
        ("--nodes", options.nodes, 1, MAX_NODES),
        ("--mtp", options.mtp, 0, MAX_DRAFTS),
        ("--price", options.price, 0.0, 1e9),
    ):
        if value is not None and not low <= value <= high:
            raise PlanError(f"{name} {value:g}: must be {low:g} to {high:g}", f"correct {name}")
    workload, slo = parse_workload(options.workload), parse_slo(options.slo)
    model = _model(options)
    has_mtp = bool(model.config.num_nextn_predict_layers)
    if options.mtp and not has_mtp:
        raise PlanError(f"--mtp {options.mtp}: {model.name} has no MTP layer", "--mtp 0")
    if model.needs_fp8 and not hardware.fp8:
        by_name = options.directory is None
        what = f"--quant {model.quantization}" if by_name else f"{options.directory}: weights of FP8"
        fix = "--quant w8a8" if by_name else "quantize it"
        raise PlanError(f"{what}: {hardware.title} does not multiply FP8", f"{fix}, or --hardware ascend-950pr")
    search_options = SearchOptions(options.mtp if has_mtp else 0, None, parse_acceptance(options.acceptance))
    price = hardware.price_per_node_hour if options.price is None else options.price
    result = make_plan(
        model, Cluster(hardware, options.nodes), workload, slo, search_options, options.layout, price
    )  # fmt: skip
    report = PlanReport(result, tails(result) if options.tails else None)
    if options.html is not None:
        write(result, Path(options.html))
    return report


def _model(options: PlanOptions) -> PlannedModel:
    if options.directory is None:
        return named(options.model or "glm-5", options.quant, options.cache)
    if options.model is not None:
        raise PlanError("both DIR and --model are given", "give one of them")
    return from_directory(Path(options.directory), options.cache)
