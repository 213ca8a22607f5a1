"""`plan --calibrate FILE`: fit the seven efficiencies to a user's own measurements, starting from the public fit.

A CSV has a row per run, with the columns of data/baselines.yaml: model, quant, nodes, tp, dp, prompt, output,
concurrency, requests, out_tok_s, and optionally prefill_tp, prefill_dp, prefix_hit, rate, ttft_ms, tpot_ms, cache,
drafts, .... The JSON of `vllm bench serve` and of AISBench holds one run and no layout: model, quantization and layout
come from the options.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from glm5_ascend.errors import PlanError, shown
from glm5_ascend.files.untrusted import read_bytes, read_json
from glm5_ascend.plan.baselines import Baseline, BaselineRow, case
from glm5_ascend.plan.efficiency import Efficiencies, efficiencies_of
from glm5_ascend.plan.hardware import Hardware, load_hardware

#: (typical value, standard deviation of its logarithm) of each efficiency. They hold constants that the data cannot
#: separate near a plausible value. Shares: of large int8 products and copies elsewhere; seconds: the difference
#: between public step times and the roofline.
PRIORS = {
    "stream": (0.6, 0.4),
    "gather": (0.3, 0.7),
    "compute": (0.4, 0.4),
    "graph_seconds": (2e-4, 0.7),
    "eager_seconds": (2e-3, 0.7),
    "token_seconds": (3e-6, 1.0),
    "prefill": (0.5, 0.4),
}
#: Expected error of a row's logarithm: the difference between two runs of the same layout.
SIGMA = 0.12
#: Half width of a difference quotient, in standardized logarithms. Predictions are exact to 1e-4 (the end of a
#: bisection) and have small jumps (whole pages, whole batches): a step as small as scipy's default would hit one.
STEP = 0.03
#: Distance of a machine's constants from the public fit, as a share of the priors' spread.
_TRUST = 0.5
#: Defaults of a row, as in a plan.
_DEFAULTS = {
    "source": "own measurement", "version": "", "date": "2026-01-01", "drafts": 3, "utilization": 0.95,
    "buffer_mb": 200, "batched_tokens": 4096, "sequences": 256, "case": "",
}  # fmt: skip
#: A benchmark's result may list every request.
_MAX_BYTES = 256 * 1024**2
_UNITS = {"tok_s": "tokens/s", "ttft": "s TTFT", "tpot": "s TPOT"}

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Rows that were read, constants before and after, and each row's ln(predicted / measured) by output."""

    cases: tuple[Baseline, ...]
    before: Efficiencies
    after: Efficiencies
    errors_before: list[dict[str, float]]
    errors_after: list[dict[str, float]]

    def lines(self) -> Iterator[str]:
        """Lines for a terminal: the error of each row before and after, and the constants."""
        for baseline, before, after in zip(self.cases, self.errors_before, self.errors_after, strict=True):
            for name, value in baseline.row.measured().items():
                error = f"{100 * math.expm1(before[name]):+.0f} % -> {100 * math.expm1(after[name]):+.0f} %"
                yield f"{baseline.row.id}: measured {value:,.4g} {_UNITS[name]}, planner {error}"
        old, new = self.before.to_json(), self.after.to_json()
        for name in PRIORS:
            yield f"{name:14} {old.get(name, 1.0):.4g} -> {new.get(name, 1.0):.4g}"


def calibrate(path: Path, hardware: str, setup: Mapping[str, Any]) -> Calibration:
    """Fit to the runs of a file.

    Args:
        hardware: machine of rows that name none.
        setup: values that a JSON file does not have: model, quant, nodes, tp, dp, ....

    Raises:
        PlanError: the file cannot be read, or a value is missing or wrong; names the row and the key.
    """
    rows = tuple(case(_row(number, raw, hardware)) for number, raw in enumerate(_read(path, setup), 1))
    if not rows:
        raise PlanError(f"--calibrate {path}: no rows", "a CSV with a header, or a benchmark's JSON")
    before = efficiencies_of(load_hardware(hardware))
    start = from_efficiencies(before)
    solution = _fit(rows, start)
    return Calibration(rows, before, to_efficiencies(solution), errors(start, rows), errors(solution, rows))


def calibrated(calibration: Calibration, hardware: str) -> Hardware:
    """The machine with the new constants."""
    machine = load_hardware(hardware)
    return machine.model_copy(
        update={"efficiencies": calibration.after.to_json(), "title": f"{machine.title}, calibrated"}
    )


def to_efficiencies(x: Vector) -> Efficiencies:
    """Efficiencies of standardized logarithms; shares stay at or below one."""
    values = {}
    for (name, (typical, spread)), z in zip(PRIORS.items(), x, strict=True):
        value = float(typical * np.exp(spread * z))
        values[name] = value if name.endswith("seconds") else min(1.0, value)
    return Efficiencies(**values)


def from_efficiencies(efficiencies: Efficiencies) -> Vector:
    """Standardized logarithms of efficiencies, the inverse of `to_efficiencies`."""
    return np.array(
        [np.log(getattr(efficiencies, name) / typical) / spread for name, (typical, spread) in PRIORS.items()]
    )


def errors(x: Vector, cases: Sequence[Baseline]) -> list[dict[str, float]]:
    """ln(predicted / measured) of each case, by output."""
    efficiency, case_errors = to_efficiencies(x), []
    for baseline in cases:
        predicted, measured = baseline.predicted(efficiency), baseline.row.measured()
        case_errors.append({name: math.log(predicted[name] / measured[name]) for name in measured})
    return case_errors


def residuals(x: Vector, cases: Sequence[Baseline]) -> Vector:
    """The errors of all outputs of all cases in one vector."""
    return np.array([value for case_errors in errors(x, cases) for value in case_errors.values()])


def _fit(rows: tuple[Baseline, ...], start: Vector) -> Vector:
    """Least squares of the rows' errors and of the distance of the constants from `start`."""
    from scipy.optimize import least_squares

    def function(x: Vector) -> Vector:
        return np.concatenate([residuals(x, rows) / SIGMA, (x - start) / _TRUST])

    solution = least_squares(function, start, diff_step=STEP, xtol=1e-4, ftol=1e-5, loss="soft_l1")
    return np.asarray(solution.x, dtype=np.float64)


def _row(number: int, raw: Mapping[str, Any], hardware: str) -> BaselineRow:
    values = {key: value for key, value in raw.items() if value not in (None, "")}
    try:
        row = BaselineRow.model_validate({**_DEFAULTS, "hardware": hardware, "id": f"row {number}", **values})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise PlanError(
            f"--calibrate: row {number}: {key}: {first['msg']}", "columns are the keys of plan/data/baselines.yaml"
        ) from None
    if not row.measured():
        raise PlanError(f"--calibrate: row {number}: nothing measured", "out_tok_s, ttft_ms or tpot_ms")
    return row


def _read(path: Path, setup: Mapping[str, Any]) -> list[dict[str, Any]]:
    fix = "a CSV, or the result file of vllm bench serve or AISBench"
    if path.suffix != ".json":
        try:
            text = read_bytes(path, _MAX_BYTES, PlanError, fix).decode("utf-8")
            return [dict(row) for row in csv.DictReader(text.splitlines())]
        except (UnicodeDecodeError, csv.Error) as error:
            raise PlanError(f"--calibrate {path}: cannot be read: {error}", fix) from None
    result = read_json(path, max_bytes=_MAX_BYTES, error=PlanError, fix=fix)
    if not isinstance(result, dict):
        raise PlanError(f"--calibrate {path}: not one object", fix)
    try:
        run = _vllm_run(result) if "output_throughput" in result else _aisbench_run(result)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise PlanError(f"--calibrate {path}: a value is not as a benchmark writes it: {error}", fix) from None
    if run is None:
        raise PlanError(f"--calibrate {path}: not of vllm bench serve or AISBench", "output_throughput is missing")
    return [{**setup, **run}]


def _vllm_run(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row of `vllm bench serve --save-result`."""
    requests = int(_positive(result, "completed" if "completed" in result else "num_prompts"))
    rate = result.get("request_rate")
    return {
        "prompt": max(1, round(_positive(result, "total_input_tokens") / requests)),
        "output": max(1, round(_positive(result, "total_output_tokens") / requests)),
        "concurrency": int(result.get("max_concurrency") or requests), "requests": requests,
        "rate": float(rate) if isinstance(rate, int | float) and math.isfinite(rate) else None,
        "out_tok_s": result["output_throughput"], "ttft_ms": result.get("mean_ttft_ms"),
        "tpot_ms": result.get("mean_tpot_ms") or None,
    }  # fmt: skip


def _positive(result: Mapping[str, Any], key: str) -> float:
    """A count of the run; a run without a successful request measures nothing."""
    value = result.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {shown(value)}, not above 0")
    return value


def _aisbench_run(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row of AISBench's summary: each value is under a name and `total`, followed by its unit."""

    def value(*names: str) -> float | None:
        for name in names:
            entry = result.get(name)
            entry = entry.get("total") if isinstance(entry, dict) else entry
            word = str(entry).split()[0] if entry not in (None, "") else ""
            try:
                return float(word)
            except ValueError:
                continue
        return None

    speed, requests = value("Output Token Throughput"), value("Total Requests", "Success Requests")
    prompt_tokens = value("Total Input Tokens", "Total input tokens")
    output_tokens = value("Total Generated Tokens", "Total generated tokens")
    if None in (speed, requests, prompt_tokens, output_tokens) or not requests:
        return None
    assert prompt_tokens is not None and output_tokens is not None
    return {
        "prompt": max(1, round(prompt_tokens / requests)), "output": max(1, round(output_tokens / requests)),
        "concurrency": round(value("Max Concurrency", "Concurrency") or requests), "requests": round(requests),
        "out_tok_s": speed,
    }  # fmt: skip
