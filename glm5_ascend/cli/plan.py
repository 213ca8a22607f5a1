"""`glm5-ascend plan`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli import help
from glm5_ascend.errors import PlanError


def register(app: typer.Typer) -> None:
    help.command(
        app, "plan", plan,
        "plan --quant w4a8 --nodes 1",
        "plan --workload in=128000,out=2000,concurrency=4 --html plan.html",
    )  # fmt: skip


def plan(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A checkpoint: its real types and bytes.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Instead of DIR: glm-5, glm-5.1 or glm-5.2.")] = None,
    quant: Annotated[str, typer.Option(help="With --model: bf16, w8a8, w4a8, w8a8c8 or w4a8c8.")] = "w4a8",
    hardware: Annotated[
        str, typer.Option(help="a3, a2, cpu (after --measure), or a YAML file that describes a machine.")
    ] = "a3",
    nodes: Annotated[int, typer.Option(help="How many machines.")] = 1,
    workload: Annotated[
        str, typer.Option(help="in=TOKENS,out=TOKENS,concurrency=N,prefix_hit=SHARE,rate=PER_SECOND,requests=N.")
    ] = "in=3500,out=1500,concurrency=16",
    mtp: Annotated[int | None, typer.Option(help="Draft tokens per step; left out: the best is searched.")] = None,
    slo: Annotated[str | None, typer.Option(help="Limits on latency: tpot=50ms,ttft=2s.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Judge this one instead of searching: tp=16,dp=1[,dcp=,replicas=,prefill_tp=,prefill_dp=]."),
    ] = None,
    cache: Annotated[str | None, typer.Option(help="Caches in INT8: none, li, li+sfa.")] = None,
    index_cache: Annotated[bool, typer.Option("--index-cache", help="Run-time reuse of the indexer's choice.")] = False,
    seqs: Annotated[int | None, typer.Option(help="--max-num-seqs of a rank; left out: as many as are needed.")] = None,
    batched_tokens: Annotated[int, typer.Option(help="--max-num-batched-tokens.")] = 4096,
    utilization: Annotated[float, typer.Option(help="--gpu-memory-utilization.")] = 0.95,
    buffer_mb: Annotated[int, typer.Option(help="HCCL_BUFFSIZE.")] = 200,
    acceptance: Annotated[
        float | None, typer.Option(help="Mean accepted length measured with 3 drafts (healthy: 3.16).")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of one machine and hour: adds the cost of a token.")] = None,
    tails: Annotated[
        bool, typer.Option("--tails", help="Also simulate the scheduler: percentiles of latency (a few seconds).")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report that needs no network.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Describe this machine's CPU for --hardware cpu: serves DIR (or the demo model)."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="With --measure: write there instead.")] = None,
) -> int:
    """Does it fit, which layout, how fast: memory, latency and throughput on paper, with their uncertainty."""
    if measure:
        return _measure(directory, out)
    if out is not None:
        raise PlanError("--out goes with --measure", "the plan itself: --json, or --html FILE")
    from glm5_ascend.plan.api import plan as run

    report = run(
        directory,
        model=model,
        quant=quant,
        hardware=hardware,
        nodes=nodes,
        workload=workload,
        mtp=mtp,
        slo=slo,
        layout=layout,
        cache=cache,
        index_cache=index_cache,
        seqs=seqs,
        batched_tokens=batched_tokens,
        utilization=utilization,
        buffer_mb=buffer_mb,
        acceptance=acceptance,
        price=price,
        tails=tails,
        html=html,
    )
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        for line in report.lines():
            print(line)
    return 0


def _measure(directory: Path | None, out: Path | None) -> int:
    """Measure this machine and write its description."""
    from glm5_ascend.errors import OutputError
    from glm5_ascend.plan.hardware import measured_file
    from glm5_ascend.serve.environment import require_cpu_environment

    target = out or measured_file()
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
    print(f"wrote {target}; use it: glm5-ascend plan {directory} --hardware {name} --mtp 0 --workload ...")
    return 0
