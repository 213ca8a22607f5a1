"""Public results and a user's own runs as data, their predictions, the fit, and what they say about a plan's error."""

from __future__ import annotations

import csv
import datetime
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from glm5_ascend.errors import PlanError
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.hardware import Constants, Hardware, fitted, load_hardware
from glm5_ascend.plan.inputs import Cache, Count, Keys, Positive, Workload, data_file, parse_workload, read_option
from glm5_ascend.plan.layout import Layout, parse_layout
from glm5_ascend.plan.memory import ENDS
from glm5_ascend.plan.model import PlannedModel, named
from glm5_ascend.plan.predict import Prediction, predict
from glm5_ascend.plan.steps import Steps

Vector = NDArray[np.float64]
#: Outputs of a row: tokens per second of the deployment, and mean seconds of first and further tokens.
OUTPUTS = ("tok_s", "ttft", "tpot")
#: Typical value of each constant, and standard deviation of its logarithm: they decide what the data cannot separate.
#: Shares: of large products and copies elsewhere; seconds: public step times without the bytes and operations.
PRIORS = {
    "memory": (0.6, 0.4), "compute": (0.25, 0.4), "graph_seconds": (2e-4, 0.7), "eager_seconds": (2e-3, 0.7),
    "token_seconds": (3e-6, 1.0), "step_seconds": (5e-3, 0.7),
}  # fmt: skip
#: Expected error of a run's logarithm: the difference between two runs of the same layout.
SIGMA = 0.12
#: Half width of a difference quotient, in standardized logarithms: predictions have small jumps (whole pages).
STEP = 0.03
#: Rows with a smaller weight are shown but not judged: their sources contradict themselves or each other.
JUDGED = 0.15
#: Sizes that differ by this factor have distance 1, as have different categories.
UNIT = 4.0
#: Relative growth of a band with each unit of distance. Not fitted: the rows show little of it.
SLOPE = 0.15
#: Distance of a user's machine from the public fit, as a share of the priors' spread.
_TRUST = 0.5


class Row(Keys):
    """A measured run: a row of data/baselines.yaml, or of a user's CSV for `plan calibrate`."""

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
    """data/baselines.yaml; see there."""

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


def make_case(row: Row) -> Case:
    """Model, machine, layout and workload of a row."""
    model, workload = named(row.model, row.quant, row.cache, row.layers), parse_workload(row.workload)
    layout = parse_layout(row.layout, model.config, workload.concurrency)
    return Case(row, model, load_hardware(row.hardware), layout, workload)


@functools.cache
def cases() -> tuple[Case, ...]:
    """All public results that can be predicted."""
    return tuple(make_case(row) for row in read_yaml(data_file("baselines.yaml"), BaselinesFile).rows)


def predictions(cases: Sequence[Case], constants: Constants) -> list[Prediction]:
    """Predict each case; raises PlanError if a run does not fit its machine by the planner's memory."""
    steps = functools.cache(functools.partial(Steps, constants=constants))
    results = []
    for case in cases:
        result = predict(steps(case.model, case.hardware), case.layout, case.workload, ends=ENDS[1:])
        if result is None:
            raise PlanError(f"run {case.row.id} does not fit the machine it ran on", "correct layout or workload")
        results.append(result)
    return results


def errors(cases: Sequence[Case], constants: Constants) -> list[dict[str, float]]:
    """ln(predicted / measured) of each case, by output."""
    pairs = zip(cases, predictions(cases, constants), strict=True)
    return [{name: math.log(getattr(p, name) / x) for name, x in case.measured.items()} for case, p in pairs]


def to_constants(x: Vector) -> Constants:
    """Constants of standardized logarithms."""
    pairs = zip(PRIORS.items(), x, strict=True)
    return Constants(**{name: float(typical * np.exp(spread * z)) for (name, (typical, spread)), z in pairs})


def to_vector(constants: Constants) -> Vector:
    """Standardized logarithms of constants, the inverse of `to_constants`."""
    values = ((max(getattr(constants, name), 1e-12) / typical, spread) for name, (typical, spread) in PRIORS.items())
    return np.array([np.log(ratio) / spread for ratio, spread in values])


def residuals(cases: Sequence[Case], constants: Constants) -> Vector:
    """The weighted errors of all outputs of all cases; their squares are soft L1, so that no run bends a fit."""
    pairs = [(e / SIGMA, c.row.weight / len(row)) for c, row in zip(cases, errors(cases, constants), strict=True)
             for e in row.values()]  # fmt: skip
    error, weight = np.array(pairs).T
    weighted: Vector = np.copysign(np.sqrt(2.0 * weight * (np.sqrt(1.0 + error**2) - 1.0)), error)
    return weighted


def fit(cases: Sequence[Case], start: Constants, trust: float = 1.0) -> Constants:
    """Constants fitted to runs by least squares; they move from `start` by about `trust` times the priors' spread."""
    from scipy.optimize import least_squares

    origin = to_vector(start)

    def function(x: Vector) -> Vector:
        return np.concatenate([residuals(cases, to_constants(x)), (x - origin) / trust])

    solution = least_squares(function, origin, diff_step=STEP, x_scale=1.0, xtol=1e-4, ftol=1e-5, max_nfev=30)
    return to_constants(np.asarray(solution.x, dtype=np.float64))


def distance(case: Case, model: PlannedModel, hardware: str, layout: Layout, load: Workload) -> float:
    """Euclidean distance of a plan from a public result: a factor of UNIT in a size, or another category, counts 1."""

    def sizes(layout: Layout, load: Workload) -> list[float]:
        engine, batch = layout.decode, load.concurrency / layout.replicas / layout.decode.dp
        values = load.fresh / load.output, load.prompt + load.output, engine.tp * engine.dp, max(0.25, batch)
        return [math.log(max(value, 1e-3), UNIT) for value in values]

    def kinds(model: PlannedModel, hardware: str, layout: Layout) -> list[object]:
        engine, stages = layout.decode, max(e.pp for e in layout.engines.values())
        switches = engine.drafts, engine.dcp > 1, stages > 1, engine.expert_parallel
        return [model.config.model_type, model.expert_type, hardware, bool(layout.prefill), *switches]

    theirs = kinds(case.model, case.hardware.name, case.layout)
    others = sum(x != y for x, y in zip(kinds(model, hardware, layout), theirs, strict=True))
    return math.hypot(math.dist(sizes(layout, load), sizes(case.layout, case.workload)), math.sqrt(others))


def has_rows(model: PlannedModel) -> bool:
    """Return True if a judged public result is of this architecture."""
    return any(case.judged and case.model.config.model_type == model.config.model_type for case in cases())


class Calibration(NamedTuple):
    """Runs, the constants before and after, and the machine with the new ones."""

    cases: list[Case]
    before: Constants
    after: Constants
    machine: Hardware

    def lines(self) -> Iterator[str]:
        """Lines for a terminal: the error of each run before and after, and the constants."""
        for case, *signed in zip(self.cases, *(errors(self.cases, x) for x in (self.before, self.after)), strict=True):
            for name, value in case.measured.items():
                change = " -> ".join(f"{100 * math.expm1(error[name]):+.0f} %" for error in signed)
                yield f"{case.row.id}: {name} measured {value:,.4g}, planner {change}"
        for name in PRIORS:
            yield f"{name:14} {getattr(self.before, name):.4g} -> {getattr(self.after, name):.4g}"


def calibrate(path: Path, hardware: str, setup: Mapping[str, Any]) -> Calibration:
    """Fit to the runs of a file, on `hardware` if a row names none, starting from the public fit.

    A CSV has a row per run, with columns of data/baselines.yaml: model, quant, nodes, layout, workload, out_tok_s, and
    optionally ttft_ms, tpot_ms, cache, hardware. For a benchmark's result, `setup` has those that it lacks.

    Raises:
        PlanError: the file cannot be read, or a value is missing or wrong; names the row and the key.
    """
    from glm5_ascend.serve.load import FORMATS, read_results, read_text

    text, rows = read_text(path), list[dict[str, Any]]()
    try:
        if text.lstrip()[:1] in ("{", "["):
            for load in read_results(path, text):
                speeds = {"out_tok_s": load.output_tokens_per_s, "ttft_ms": load.ttft_ms, "tpot_ms": load.tpot_ms}
                rows.append({**setup, "workload": load.workload, **speeds})
        else:
            rows = list(csv.DictReader(text.splitlines()))
    except csv.Error as error:
        raise PlanError(f"{path}: cannot be read: {error}", FORMATS) from None
    cases = []
    for number, row in enumerate(rows, 1):
        named = {"id": f"row {number}", "source": "own measurement", "hardware": hardware}
        named |= {key: value for key, value in row.items() if value not in (None, "", 0)}
        tip = "columns are the keys of plan/data/baselines.yaml"
        cases.append(make_case(read_option(f"calibrate: row {number}", Row, named, tip)))
        if not cases[-1].measured:
            raise PlanError(f"calibrate: row {number}: nothing measured", "out_tok_s, ttft_ms or tpot_ms")
    if not cases:
        raise PlanError(f"calibrate {path}: no rows", "a CSV with a header, or a benchmark's JSON")
    machine = load_hardware(hardware)
    before = machine.constants or fitted().constants
    after = fit(cases, before, _TRUST)
    changes = {"constants": after, "title": f"{machine.title}, calibrated"}
    return Calibration(cases, before, after, machine.model_copy(update=changes))
