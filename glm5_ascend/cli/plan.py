"""`glm5-ascend plan`."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import glm5_ascend.cli.plan_options as options
from glm5_ascend.cli.help import command as add_command
from glm5_ascend.errors import PlanError

if TYPE_CHECKING:
    from glm5_ascend.plan.result import Plan


def register(app: typer.Typer) -> None:
    add_command(
        app, "plan", plan,
        "plan --quant w4a8 --nodes 4 --slo tpot=50ms,ttft=2s",
        "plan work/glm5-w4a8 --html plan.html",
    )  # fmt: skip


def plan(
    directory: options.Directory = None,
    model: options.ModelName = None,
    quant: options.Quant = "w4a8",
    cache: options.Cache = None,
    index_cache: options.IndexCache = False,
    hardware: options.HardwareName = "a3",
    nodes: options.Nodes = 1,
    price: options.Price = None,
    power: options.Power = None,
    workload: options.Workload = "in=3500,out=1500,concurrency=16",
    slo: options.Slo = None,
    acceptance: options.Acceptance = None,
    imbalance: options.Imbalance = 1.0,
    host_time: options.HostTime = 1.0,
    layout: options.LayoutText = None,
    mtp: options.Drafts = None,
    seqs: options.Sequences = None,
    batched_tokens: options.BatchedTokens = 4096,
    utilization: options.Utilization = 0.95,
    buffer_mb: options.BufferMb = 200,
    tails: options.Tails = False,
    html: options.Html = None,
    as_json: options.AsJson = False,
    sweep: options.Sweep = False,
    what_if: options.WhatIf = False,
    csv: options.CsvFile = None,
    baselines: options.Baselines = False,
    measure: options.Measure = False,
    calibrate: options.Calibrate = None,
    out: options.Out = None,
) -> int:
    """Does it fit, which layout, how fast: memory, latency and throughput on paper, with their uncertainty."""
    if measure:
        return _measure(directory, out)
    if calibrate is not None:
        setup = {"model": model or "glm-5", "quant": quant, "nodes": nodes, "cache": cache, "index_cache": index_cache}
        return _calibrate(calibrate, hardware, setup, layout, out)
    if out is not None:
        raise PlanError("--out goes with --measure or --calibrate", "the plan itself: --json, or --html FILE")
    if baselines:
        return _baselines(as_json)
    if csv is not None and not (sweep or what_if):
        raise PlanError("--csv goes with --sweep or --what-if", "the plan itself: --json, or --html FILE")
    from glm5_ascend.plan.api import plan as run

    asked: dict[str, Any] = {
        "model": model, "quant": quant, "cache": cache, "index_cache": index_cache, "hardware": hardware,
        "nodes": nodes, "price": price, "power": power, "workload": workload, "slo": slo, "acceptance": acceptance,
        "layout": layout, "mtp": mtp, "seqs": seqs, "batched_tokens": batched_tokens, "utilization": utilization,
        "buffer_mb": buffer_mb, "imbalance": imbalance, "host_time": host_time,
    }  # fmt: skip
    if what_if:
        return _what_if(directory, asked, csv, as_json)
    report = run(directory, **asked, tails=tails)
    from glm5_ascend.deploy.planning.commands import plan_commands

    report = replace(report, commands=plan_commands(report.plan))
    if html is not None:
        from glm5_ascend.plan.html import write

        write(report.plan, html, report.commands)
    if sweep:
        return _sweep(report.plan, csv, as_json)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        from rich.console import Console

        report.show(Console(highlight=False))
    return 0


def _what_if(directory: Path | None, asked: dict[str, Any], csv: Path | None, as_json: bool) -> int:
    """Print the table of other machines, weights and contexts."""
    from glm5_ascend.plan.command import PlanRequest
    from glm5_ascend.plan.tables import what_if

    _table(list(what_if(PlanRequest(directory=directory, **asked))), csv, as_json)
    return 0


def _sweep(made: Plan, csv: Path | None, as_json: bool) -> int:
    """Print the layout and the table of its loads."""
    from glm5_ascend.plan.tables import goodput, sweep

    rows = sweep(made)
    if not as_json:
        print(made.chosen.layout)
    _table(rows, csv, as_json)
    if not as_json:
        print(goodput(rows))
    return 0


def _table(rows: list[dict[str, Any]], csv: Path | None, as_json: bool) -> None:
    from glm5_ascend.plan.tables import cells, write_csv
    from glm5_ascend.report.terminal import show

    if csv is not None:
        write_csv(rows, csv)
    if as_json:
        print(json.dumps({"schema_version": 1, "command": "plan", "ok": True, "exit_code": 0, "rows": rows}))
    else:
        show(cells(rows))


def _calibrate(path: Path, hardware: str, setup: dict[str, object], layout: str | None, out: Path | None) -> int:
    """Fit to the user's runs, print what changed, and write the machine."""
    from glm5_ascend.errors import OutputError
    from glm5_ascend.plan import calibrate
    from glm5_ascend.plan.measure.describe import write
    from glm5_ascend.plan.search import read_layout

    if out is not None and out.exists():
        raise OutputError(f"{out} exists already", "name another file, or remove it")
    sizes: dict[str, int] = {"dp": 1, **(read_layout(layout) if layout else {})}
    known = ("tp", "dp", "pp", "prefill_tp", "prefill_dp", "prefill_pp", "prefills")
    found = calibrate.calibrate(path, hardware, {**setup, **{key: sizes[key] for key in known if key in sizes}})
    for line in found.lines():
        print(line)
    if out is not None:
        write(calibrate.calibrated(found, hardware), out, replace=False)
        print(f"wrote {out}; use it: glm5-ascend plan --hardware {out}")
    return 0


def _baselines(as_json: bool) -> int:
    """List the public results."""
    from glm5_ascend.plan import listing

    if as_json:
        print(json.dumps(listing.to_json()))
    else:
        from rich.console import Console

        listing.show_baselines(Console(highlight=False))
    return 0


def _measure(directory: Path | None, out: Path | None) -> int:
    """Measure this machine and write its description."""
    from glm5_ascend.errors import OutputError
    from glm5_ascend.plan.hardware import measured_file
    from glm5_ascend.serve.environment import require_cpu_environment

    target = out or measured_file()
    shown = directory or "DIR"  # the demo model is gone with its folder
    if out is not None and out.exists():
        raise OutputError(f"{out} exists already", "name another file, or remove it")
    require_cpu_environment()
    from glm5_ascend.plan.measure.describe import measure, summary, write

    with tempfile.TemporaryDirectory() as folder:
        if directory is None:
            from glm5_ascend.demo_model.resources import write_demo_model

            directory = write_demo_model(Path(folder) / "glm5-demo")
        handle, log = tempfile.mkstemp(prefix="glm5-measure-", suffix=".log")  # kept where the server fails
        os.close(handle)
        found = measure(directory, Path(log))
        os.unlink(log)
    write(found, target, replace=out is None)
    for line in summary(found):
        print(line)
    name = "cpu" if out is None else target
    load = "--mtp 0 --workload in=1024,out=64,concurrency=8"
    print(f"wrote {target}; use it: glm5-ascend plan {shown} --hardware {name} {load}")
    return 0
