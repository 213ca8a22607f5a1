"""Public results as data, and the distance of a plan from them."""

from __future__ import annotations

import datetime
import functools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.hardware import Hardware, fitted, load_hardware, machine_type
from glm5_ascend.plan.inputs import Cache, Count, Keys, Positive, Workload, data_file, parse_workload
from glm5_ascend.plan.layout import Layout, parse_layout
from glm5_ascend.plan.model import PlannedModel, named

#: Outputs of a row: tokens per second of the deployment, and mean seconds of first and further tokens.
OUTPUTS = ("tok_s", "ttft", "tpot")
#: Rows with a smaller weight are shown but not judged: their sources contradict themselves or each other.
JUDGED = 0.15
#: Factor between sizes of distance 1; growth of a band with each unit of distance, not fitted: rows show little of it.
UNIT, SLOPE = 4.0, 0.15


class Row(Keys):
    """A measured run, as a row of data/baselines.yaml."""

    id: str = "own"
    case: str = ""
    engine: Literal["vllm-ascend", "sglang"] = "vllm-ascend"
    source: str = "vllm-ascend CI configuration"
    version: str = "main 182b75e"
    date: datetime.date = datetime.date(2026, 8, 22)
    model: str
    quant: str
    cache: Cache | None = None
    layers: Count | None = None
    hardware: str = "a3"
    nodes: Count
    layout: str
    workload: str
    out_tok_s: Positive | None = None
    total_tok_s: Positive | None = None
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    note: str = ""


class BaselinesFile(Keys):
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Case:
    """A row ready to be predicted."""

    row: Row
    model: PlannedModel
    hardware: Hardware
    layout: Layout
    workload: Workload

    @property
    def measured(self) -> dict[str, float]:
        """Published values by the names of OUTPUTS: output tokens per second, seconds."""
        row, load = self.row, self.workload
        speed = row.out_tok_s or (row.total_tok_s or 0.0) * load.output / (load.prompt + load.output)
        values = speed, (row.ttft_ms or 0.0) / 1e3, (row.tpot_ms or 0.0) / 1e3
        return {name: value for name, value in zip(OUTPUTS, values, strict=True) if value}

    @property
    def judged(self) -> bool:
        """A row of vllm-ascend without contradictions: the planner's errors are counted on it."""
        return self.row.engine == "vllm-ascend" and self.row.weight >= JUDGED

    @property
    def whole(self) -> bool:
        """A judged row of a whole model's throughput."""
        return self.judged and self.row.layers is None and self.row.out_tok_s is not None

    @property
    def unseen(self) -> dict[str, float]:
        """ln(predicted / measured) by output, of a fit without the rows of its source."""
        return fitted().unseen.get(self.row.id, {})


def make_case(row: Row) -> Case:
    """Model, machine, layout and workload of a row."""
    model, workload = named(row.model, row.quant, row.cache, row.layers), parse_workload(row.workload)
    layout = parse_layout(row.layout, model.config, workload.concurrency)
    return Case(row, model, load_hardware(row.hardware), layout, workload)


@functools.cache
def cases() -> tuple[Case, ...]:
    """All public results that can be predicted."""
    return tuple(make_case(row) for row in read_yaml(data_file("baselines.yaml"), BaselinesFile).rows)


def distance(case: Case, model: PlannedModel, hardware: str, layout: Layout, load: Workload) -> float:
    """Euclidean distance of a plan from a public result: a factor of UNIT in a size, or another category, counts 1."""

    def sizes(layout: Layout, load: Workload) -> list[float]:
        engine, batch = layout.decode, load.concurrency / layout.replicas / layout.decode.dp
        values = load.fresh / load.output, load.prompt + load.output, engine.tp * engine.dp, max(0.25, batch)
        clients = load.concurrency, max(1.0, load.prefix_hit * load.different)
        return [math.log(max(value, 1e-3), UNIT) for value in (*values, *clients)]

    def categories(model: PlannedModel, hardware: str, layout: Layout) -> list[object]:
        engine, stages = layout.decode, max(e.pp for e in layout.engines.values())
        switches = engine.drafts, engine.dcp > 1, stages > 1, engine.expert_parallel
        return [model.config.model_type, model.expert_type, hardware, bool(layout.prefill), *switches]

    theirs = categories(case.model, case.hardware.name, case.layout)
    others = sum(x != y for x, y in zip(categories(model, hardware, layout), theirs, strict=True))
    return math.hypot(math.dist(sizes(layout, load), sizes(case.layout, case.workload)), math.sqrt(others))


def alike(model: PlannedModel, hardware: Hardware, layout: Layout, load: Workload) -> list[Case]:
    """Judged rows of whole models of this architecture on these machines, with PD or without, with hits from there."""

    def traits(model: PlannedModel, hardware: Hardware, layout: Layout, load: Workload) -> tuple[object, ...]:
        hits = load.hits if load.prefix_hit else "device"
        return model.config.model_type, machine_type(hardware.name), bool(layout.prefill), hits

    asked = traits(model, hardware, layout, load)
    whole = (case for case in cases() if case.judged and case.row.layers is None)
    return [case for case in whole if traits(case.model, case.hardware, case.layout, case.workload) == asked]


def medians(cases: Iterable[Case]) -> dict[str, tuple[float, int]]:
    """Median error of unseen results, and their number, by output."""
    cases = list(cases)
    errors = {name: [abs(math.expm1(case.unseen[name])) for case in cases if name in case.unseen] for name in OUTPUTS}
    return {name: (statistics.median(values), len(values)) for name, values in errors.items() if values}
