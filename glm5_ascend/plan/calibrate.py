"""`plan --calibrate FILE`: the constants fitted to a user's own measurements, started from the public fit.

A CSV has a row per run, in the words of data/baselines.yaml: model, quant, nodes, tp, dp, prompt, output, concurrency,
requests, out_tok_s, and if wanted prefill_tp, prefill_dp, prefix_hit, rate, ttft_ms, tpot_ms, cache, drafts, .... The
JSON of `vllm bench serve` and of AISBench holds one run and no layout: model, quantization and layout come with it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from glm5_ascend.errors import PlanError, shown
from glm5_ascend.files.untrusted import read_bytes, read_json
from glm5_ascend.plan import fitting
from glm5_ascend.plan.baselines import Baseline, BaselineRow, case
from glm5_ascend.plan.efficiency import Efficiencies, efficiencies_of
from glm5_ascend.plan.hardware import Hardware, load_hardware

#: What a row may leave out, as in a plan.
_DEFAULTS = {
    "source": "own measurement", "version": "", "date": "2026-01-01", "drafts": 3, "utilization": 0.95,
    "buffer_mb": 200, "batched_tokens": 4096, "sequences": 256, "case": "",
}  # fmt: skip
#: How far a machine's constants may lie from the public fit, as a share of the priors' spread.
_TRUST = 0.5
#: A benchmark's result may list every request.
_MAX_BYTES = 256 * 1024**2
_UNITS = {"tok_s": "tokens/s", "ttft": "s TTFT", "tpot": "s TPOT"}


@dataclass(frozen=True)
class Calibration:
    """Rows read, constants before and after, and each row's ln(predicted / measured) by output."""

    cases: tuple[Baseline, ...]
    before: Efficiencies
    after: Efficiencies
    errors_before: list[dict[str, float]]
    errors_after: list[dict[str, float]]

    def lines(self) -> Iterator[str]:
        """For a terminal: what each row was off by and is now, and the constants that moved."""
        for one, old, new in zip(self.cases, self.errors_before, self.errors_after, strict=True):
            for name, value in one.row.measured().items():
                off = f"{100 * math.expm1(old[name]):+.0f} % -> {100 * math.expm1(new[name]):+.0f} %"
                yield f"{one.row.id}: measured {value:,.4g} {_UNITS[name]}, planner {off}"
        was, now = self.before.to_json(), self.after.to_json()
        for name in fitting.PRIORS:
            yield f"{name:14} {was.get(name, 1.0):.4g} -> {now.get(name, 1.0):.4g}"


def calibrate(path: Path, hardware: str, setup: Mapping[str, Any]) -> Calibration:
    """Fit to the runs of a file.

    Args:
        hardware: of rows that name none. setup: what a JSON file does not say: model, quant, nodes, tp, dp, ....
    Raises:
        PlanError: the file cannot be read, or says too little; names the row and the key.
    """
    rows = tuple(case(_row(number, raw, hardware)) for number, raw in enumerate(_read(path, setup), 1))
    if not rows:
        raise PlanError(f"--calibrate {path}: no rows", "a CSV with a header, or a benchmark's JSON")
    before = efficiencies_of(load_hardware(hardware))
    start = fitting.from_efficiencies(before)
    moved = _fit(rows, start)
    after = fitting.to_efficiencies(moved)
    return Calibration(rows, before, after, fitting.errors(start, rows), fitting.errors(moved, rows))


def calibrated(found: Calibration, hardware: str) -> Hardware:
    """The machine with the new constants."""
    own = load_hardware(hardware)
    return own.model_copy(update={"efficiencies": found.after.to_json(), "title": f"{own.title}, calibrated"})


def _fit(rows: tuple[Baseline, ...], start: fitting.Vector) -> fitting.Vector:
    """Least squares of the rows' errors and of how far the constants move."""
    from scipy.optimize import least_squares

    def function(x: fitting.Vector) -> fitting.Vector:
        return np.concatenate([fitting.residuals(x, rows) / fitting.SIGMA, (x - start) / _TRUST])

    found = least_squares(function, start, diff_step=fitting.STEP, xtol=1e-4, ftol=1e-5, loss="soft_l1")
    return np.asarray(found.x, dtype=np.float64)


def _row(number: int, raw: Mapping[str, Any], hardware: str) -> BaselineRow:
    told = {key: value for key, value in raw.items() if value not in (None, "")}
    try:
        row = BaselineRow.model_validate({**_DEFAULTS, "hardware": hardware, "id": f"row {number}", **told})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise PlanError(f"--calibrate: row {number}: {key}: {first['msg']}", "words as in plan --baselines") from None
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
    found = read_json(path, max_bytes=_MAX_BYTES, error=PlanError, fix=fix)
    if not isinstance(found, dict):
        raise PlanError(f"--calibrate {path}: not one object", fix)
    try:
        own = _of_vllm(found) if "output_throughput" in found else _of_aisbench(found)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise PlanError(f"--calibrate {path}: a value is not as a benchmark writes it: {error}", fix) from None
    if own is None:
        raise PlanError(f"--calibrate {path}: not of vllm bench serve or AISBench", "output_throughput is missing")
    return [{**setup, **own}]


def _of_vllm(found: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm bench serve --save-result`."""
    requests = int(_above_zero(found, "completed" if "completed" in found else "num_prompts"))
    rate = found.get("request_rate")
    return {
        "prompt": max(1, round(_above_zero(found, "total_input_tokens") / requests)),
        "output": max(1, round(_above_zero(found, "total_output_tokens") / requests)),
        "concurrency": int(found.get("max_concurrency") or requests), "requests": requests,
        "rate": float(rate) if isinstance(rate, int | float) and math.isfinite(rate) else None,
        "out_tok_s": found["output_throughput"], "ttft_ms": found.get("mean_ttft_ms"),
        "tpot_ms": found.get("mean_tpot_ms") or None,
    }  # fmt: skip


def _above_zero(found: Mapping[str, Any], key: str) -> float:
    """A count of the run; one in which nothing ended well measures nothing."""
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {shown(value)}, not above 0")
    return value


def _of_aisbench(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """AISBench's summary: every value stands under a name and `total`, with its unit behind it."""

    def value(*names: str) -> float | None:
        for name in names:
            own = found.get(name)
            own = own.get("total") if isinstance(own, dict) else own
            word = str(own).split()[0] if own not in (None, "") else ""
            try:
                return float(word)
            except ValueError:
                continue
        return None

    speed, requests = value("Output Token Throughput"), value("Total Requests", "Success Requests")
    came = value("Total Input Tokens", "Total input tokens")
    went = value("Total Generated Tokens", "Total generated tokens")
    if None in (speed, requests, came, went) or not requests:
        return None
    assert came is not None and went is not None
    return {
        "prompt": max(1, round(came / requests)), "output": max(1, round(went / requests)),
        "concurrency": round(value("Max Concurrency", "Concurrency") or requests), "requests": round(requests),
        "out_tok_s": speed,
    }  # fmt: skip
