"""Steps of an acceptance that measure: kernels, this CPU, served log-probabilities, and a load against its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5_ascend.deploy.acceptance.steps import FAILED, OK, WARNING, Acceptance, AcceptStep, StepResult
from glm5_ascend.deploy.planning.ranks import engine_of
from glm5_ascend.engine_lines import CPU, SGLANG
from glm5_ascend.errors import CheckFailedError, Glm5Error
from glm5_ascend.fidelity.api import evaluate
from glm5_ascend.plan.api import plan
from glm5_ascend.plan.inputs import parse_workload
from glm5_ascend.plan.layout import Layout
from glm5_ascend.serve.load import run_load

HARDWARE = "hardware.yaml"
#: Implementations that run on an NPU: name in the registry -> words for a message.
NPU_KERNELS = {"npu": "the official operators", "triton": "our Triton kernels"}
FIGURES = ("output_tokens_per_s", "tpot_ms", "ttft_ms")


def compare_kernels(acceptance: Acceptance) -> StepResult:
    """`parity --device npu` (cpu for the CPU's profile): every implementation that runs, against the reference."""
    from glm5_ascend.model.device import find_device
    from glm5_kernels import ops

    device = str(find_device("npu" if acceptance.on_npu else CPU))
    rows = list(ops.parity(device))
    figures: dict[str, Any] = {}
    for row in rows:
        counts = figures.setdefault(
            row.implementation, {"results": 0, "failed": 0, "skipped": 0, "largest_relative": 0.0}
        )
        counts["skipped" if row.skipped else "results"] += 1
        counts["failed"] += not row.ok
        counts["largest_relative"] = max(counts["largest_relative"], min(row.relative, 1e30))
    failed = [f"{row.op} {row.implementation} {row.variant}: {row.worst}" for row in rows if not row.ok]
    total = sum(counts["results"] for counts in figures.values())
    if not total:
        return StepResult(FAILED, f"nothing but the reference runs on {device}", figures)
    ran = ", ".join(f"{name} {counts['results']}" for name, counts in figures.items())
    verdict = f"{total} results on {device} ({ran}), {len(failed)} failed" + (f": {failed[0]}" if failed else "")
    absent = [
        words for name, words in NPU_KERNELS.items() if acceptance.on_npu and not figures.get(name, {}).get("results")
    ]
    verdict += f"; nothing of {' and '.join(absent)} was compared" if absent else ""
    status = FAILED if failed else WARNING if absent else OK
    return StepResult(status, verdict, {"implementations": figures, "failed": failed[:20]})


def measure_cpu(acceptance: Acceptance) -> StepResult:
    """`plan measure`: this CPU as the planner's hardware. A busy machine that cannot be measured is a warning."""
    from glm5_ascend.plan.hardware import write
    from glm5_ascend.plan.measure import measure

    try:
        hardware = measure(acceptance.directory, acceptance.folder / "measure.log", rounds=3)
    except CheckFailedError as error:
        return StepResult(WARNING, f"not measured: {error.message}", {"fix": error.tip})
    write(hardware, acceptance.folder / HARDWARE)
    figures = hardware.model_dump(mode="json", include={"rates", "constants"})
    return StepResult(OK, f"{hardware.title}, measured on {hardware.measured_on}", figures)


def evaluate_server(acceptance: Acceptance) -> StepResult:
    """`eval --url URL --against SRC`: the served log-probabilities against the reference on this CPU."""
    if acceptance.profile.engine == SGLANG:
        return StepResult(WARNING, "SGLang gives no log-probabilities of prompts: nothing was compared")
    report = evaluate(
        url=acceptance.server.url, against=acceptance.against or acceptance.directory, window=acceptance.window,
        windows=acceptance.windows,
        model=acceptance.server.model, key=acceptance.key,
    )  # fmt: skip
    verdict = report.verdict()
    status = {"good": OK, "fair": WARNING}.get(verdict.grade, FAILED)
    figures = {row.name: row.value for row in report.rows}
    return StepResult(status, verdict.text, {**figures, "grade": verdict.grade, "threshold": verdict.threshold})


def predict(acceptance: Acceptance) -> StepResult:
    """`plan DIR` for the profile's machine, its layout and this load. A missing plan is a warning."""
    try:
        planned = _planned(acceptance, None)
    except Glm5Error as error:
        return StepResult(WARNING, f"no plan: {error.message}", {"fix": error.tip})
    figures = {name: planned[name] for name in (*FIGURES, "layout", "evidence", "nearest")}
    ranges = ((name, planned[name]) for name in FIGURES)
    verdict = ", ".join(f"{name} {x['value']:g} [{x['low']:g}-{x['high']:g}]" for name, x in ranges)
    return StepResult(OK, verdict, figures)


def run_load_test(acceptance: Acceptance) -> StepResult:
    """The load, compared with the plan for the measured acceptance. A speed outside of its range is a warning."""
    result = acceptance.run
    if result is None:
        load = parse_workload(acceptance.load)
        clients = max(1, round(load.concurrency))
        result = run_load(acceptance.server, load.prompt, load.output, clients, load.requests or 2 * clients)
    measured = result.to_dict()
    if acceptance.run is not None:  # what the other tool's file says
        measured = {name: measured[name] for name in FIGURES if measured[name]}
    if result.failed:
        problem = f"{result.failed} of {result.requests} requests failed: {result.error}"
        return StepResult(FAILED, problem, {"measured": measured})
    figures: dict[str, Any] = {"measured": measured}
    try:
        planned = _planned(acceptance, result.per_step)
    except Glm5Error as error:
        speed = f"{measured['output_tokens_per_s']:.1f} tokens/s"
        return StepResult(WARNING, f"{acceptance.run_origin}{speed}; no plan: {error.message}", figures)
    outside, parts = [], []
    for name in (name for name in FIGURES if measured.get(name)):
        value, predicted = measured[name], planned[name]
        parts.append(
            f"{name} {value:.4g} (plan {predicted['value']:.4g} [{predicted['low']:.4g}-{predicted['high']:.4g}])"
        )
        if not predicted["low"] <= value <= predicted["high"]:
            outside.append(name)
    figures["predicted"] = {name: planned[name] for name in FIGURES}
    more = f"; outside of the plan's range: {', '.join(outside)}" if outside else ""
    return StepResult(WARNING if outside else OK, f"{acceptance.run_origin}{', '.join(parts)}{more}", figures)


def _planned(acceptance: Acceptance, per_step: float | None) -> dict[str, Any]:
    """The data of `plan --json` for the profile's layout. per_step: measured tokens per step."""
    role, nodes = list(acceptance.profile.roles.values())[-1], int(acceptance.profile.hardware["nodes"])
    args = role.args
    drafts = int((args.get("speculative-config") or {}).get("num_speculative_tokens", 0))
    layout = None
    if len(acceptance.profile.roles) == 1 and "tensor-parallel-size" in args:
        layout = Layout(engine_of(role, acceptance.profile.line)).text()
    hardware = str(acceptance.profile.hardware["node"]).split(" or ")[0]
    if not acceptance.on_npu:
        hardware = str(acceptance.folder / HARDWARE)
        if not Path(hardware).is_file():
            raise CheckFailedError("this machine was not measured", "see the step hardware")
    report = plan(
        acceptance.directory, hardware=hardware, nodes=nodes, workload=acceptance.load, mtp=drafts, layout=layout,
        acceptance=per_step if drafts == 3 else None,
    )  # fmt: skip
    return report.to_dict()


PARITY_SENDS = (
    "to this project: accept.json and the output of glm5-ascend parity --device npu --json. If only `npu` (the "
    "official operators) fails, also to Huawei's torch_npu: op, variant and the versions of CANN and torch_npu"
)
EVAL_SENDS = (
    "to this project: accept.json, serve.log, and the output of glm5-ascend verify DIR. If parity is ok, the "
    "engine's own operators differ: to vllm-ascend, with both"
)
PLANNER_SENDS = (
    "to this project: accept.json; its figures become a run for plan calibrate. Requests that failed: to the engine, "
    "with serve.log"
)
PARITY = AcceptStep("parity", compare_kernels, PARITY_SENDS)
HARDWARE_STEP = AcceptStep("hardware", measure_cpu, PLANNER_SENDS)
PLAN = AcceptStep("plan", predict, PLANNER_SENDS, npu=False)
EVAL = AcceptStep("eval", evaluate_server, EVAL_SENDS, server=True)
LOAD = AcceptStep("load", run_load_test, PLANNER_SENDS, server=True)
