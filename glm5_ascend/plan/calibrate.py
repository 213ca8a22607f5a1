"""`plan calibrate RUNS`: fit the constants to a user's own runs, starting from the public fit.

A CSV has a row per run, with columns of data/baselines.yaml: model, quant, nodes, layout, workload, out_tok_s, and
optionally ttft_ms, tpot_ms, cache, hardware. A result of `vllm bench serve`, AISBench, evalscope or SGLang's
bench_serving has no layout: model, quantization and layout come from the options.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from glm5_ascend.errors import PlanError
from glm5_ascend.plan.evidence import PRIORS, Case, Row, errors, fit, make_case
from glm5_ascend.plan.hardware import Constants, Hardware, fitted, load_hardware
from glm5_ascend.plan.inputs import read_option
from glm5_ascend.serve.load_files import FORMATS, read_results, read_text

#: Distance of a machine's constants from the public fit, as a share of the priors' spread.
_TRUST = 0.5


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
    """Fit to the runs of a file, on `hardware` if a row names none; `setup` has keys of a row that a JSON file lacks.

    Raises:
        PlanError: the file cannot be read, or a value is missing or wrong; names the row and the key.
    """
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
