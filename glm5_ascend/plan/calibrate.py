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

import yaml

from glm5_ascend.errors import OutputError, PlanError, shortened, shown
from glm5_ascend.files.untrusted import parse_json, read_bytes
from glm5_ascend.files.written import write_named
from glm5_ascend.plan.evidence import PRIORS, Case, Row, errors, fit, make_case
from glm5_ascend.plan.hardware import Constants, Hardware, fitted, load_hardware
from glm5_ascend.plan.inputs import read_option

#: Distance of a machine's constants from the public fit, as a share of the priors' spread.
_TRUST = 0.5
#: A benchmark's result may list every request.
_MAX_BYTES = 256 * 1024**2
_FORMATS = "a CSV, or the result of vllm bench serve, AISBench, evalscope or SGLang's bench_serving (.json, .jsonl)"
#: Names of a run's values in results: vllm bench serve and SGLang's bench_serving, AISBench, evalscope.
_NAMES = {
    "requests": ("completed", "num_prompts", "Total Requests", "Success Requests", "Succeed requests"),
    "input": ("total_input_tokens", "Total Input Tokens", "Total input tokens"),
    "output": ("total_output_tokens", "Total Generated Tokens", "Total generated tokens"),
    "concurrency": ("max_concurrency", "Max Concurrency", "Concurrency", "Number of concurrency"),
    "out_tok_s": ("output_throughput", "Output Token Throughput", "Output token throughput (tok/s)"),
    "ttft_ms": ("mean_ttft_ms",), "tpot_ms": ("mean_tpot_ms",),
    "ttft_s": ("Average time to first token (s)",), "tpot_s": ("Average time per output token (s)",),
    "prompt": ("Average input tokens per request",), "answer": ("Average output tokens per request",),
}  # fmt: skip


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
    text, rows = _text(path), list[dict[str, Any]]()
    try:
        if text.lstrip()[:1] in ("{", "["):
            rows = [{**setup, **run} for run in read_results(path, text)]
        else:
            rows = list(csv.DictReader(text.splitlines()))
    except csv.Error as error:
        raise PlanError(f"{path}: cannot be read: {error}", _FORMATS) from None
    cases = []
    for number, row in enumerate(rows, 1):
        named = {"id": f"row {number}", "source": "own measurement", "hardware": hardware}
        named |= {key: value for key, value in row.items() if value not in (None, "")}
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


def write(hardware: Hardware, path: Path, *, replace: bool = False) -> None:
    """Write a machine's description as YAML; raises OutputError if the file exists, or cannot be written."""
    if path.exists() and not replace:
        raise OutputError(f"{path} exists already", "name another file, or remove it")
    text = yaml.safe_dump(hardware.model_dump(mode="json", exclude_none=True), sort_keys=False, width=110)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}", "name another file") from None
    write_named(path, f"# Written by `glm5-ascend plan {'measure' if hardware.measured_on else 'calibrate'}`.\n{text}")


def _text(path: Path) -> str:
    try:
        return read_bytes(path, _MAX_BYTES, PlanError, _FORMATS).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: cannot be read: {error}", _FORMATS) from None


def read_results(path: Path, text: str | None = None) -> list[dict[str, Any]]:
    """Runs of a benchmark's JSON or JSON lines: workload, out_tok_s, ttft_ms and tpot_ms (None: not in the file).

    Raises:
        PlanError: the file cannot be read, or a value is missing or wrong; names the file, the line and the key.
    """
    text, runs = _text(path) if text is None else text, []
    lines = text.splitlines()
    if len(lines) < 2 or not lines[0].rstrip().endswith("}"):
        lines = [text]  # one object in the whole file, or one on each line, as SGLang's bench_serving appends them
    for number, line in enumerate(lines, 1):
        name, problem = str(path) if len(lines) == 1 else f"{path}, line {number}", "not valid JSON: "
        if not line:
            continue
        try:
            result = parse_json(line)
            problem = "not a benchmark's result: "
            if not isinstance(result, dict):
                raise PlanError(f"{name}: not one object", _FORMATS)
            runs.append(_run(result))
        except ValueError as error:
            raise PlanError(f"{name}: {problem}{shortened(str(error), 160)}", _FORMATS) from None
    return runs


def _run(result: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a benchmark's result; AISBench has each value under `total`, followed by its unit."""

    def value(what: str, default: float | None = 0.0) -> float:
        name = next((name for name in _NAMES[what] if name in result), "")
        entry = result.get(name)
        entry = entry.get("total") if isinstance(entry, dict) else entry
        if entry is None:
            if default is None:
                raise ValueError(f"{_NAMES[what][0]} is missing")
            return default
        try:
            number = math.nan if isinstance(entry, bool) else float(str(entry).partition(" ")[0])
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise ValueError(f"{name} is {shown(entry)}, not above 0")
        return number

    speed, requests = value("out_tok_s", None), value("requests", None)
    prompt = value("prompt") or value("input", None) / requests
    answer = value("answer") or value("output", None) / requests
    load = f"in={max(1, round(prompt))},out={max(1, round(answer))},requests={round(requests)}"
    rate = result.get("request_rate")
    if isinstance(rate, int | float) and 0 < rate < math.inf:
        load += f",rate={rate:g}"
    ttft, tpot = (value(f"{name}_ms") or 1e3 * value(f"{name}_s") for name in ("ttft", "tpot"))
    load += f",concurrency={round(value('concurrency') or requests)}"
    return {"workload": load, "out_tok_s": speed, "ttft_ms": ttft or None, "tpot_ms": tpot or None}
