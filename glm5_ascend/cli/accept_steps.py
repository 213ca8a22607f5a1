"""The steps of `accept` that need planner and evaluation, and the order of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.acceptance.journal import FAILED, OK, WARNING
from glm5_ascend.deploy.acceptance.steps import CPU, DOCTOR, SMOKE, WATCH, Accepting, AcceptStep, StepOutcome
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.errors import CheckFailedError, Glm5Error
from glm5_ascend.fidelity.api import evaluate
from glm5_ascend.plan.api import plan
from glm5_ascend.plan.measure.load import put_load
from glm5_ascend.plan.workload import Workload, parse_workload

HARDWARE = "hardware.yaml"
NPU_LOAD, CPU_LOAD = "in=3500,out=1500,concurrency=16,requests=32", "in=256,out=64,concurrency=4,requests=12"
#: Implementations that an NPU should have, by their names in the registry.
NPU_KERNELS = {"npu": "the official operators", "triton": "our Triton kernels"}
FIGURES = ("output_tokens_per_s", "tpot_ms", "ttft_ms")


@dataclass(frozen=True)
class AcceptSizes:
    """against: reference of eval. workload: of the load test, None for a usual one. windows, window: of eval."""

    against: Path
    workload: str | None
    windows: int
    window: int

    def load(self, setting: Accepting) -> str:
        return self.workload or (NPU_LOAD if setting.on_npu else CPU_LOAD)


def steps(setting: Accepting, sizes: AcceptSizes) -> tuple[list[AcceptStep], list[AcceptStep]]:
    """What runs before the server, and with it.

    Raises:
        PlanError: the workload cannot be read.
    """
    workload = parse_workload(sizes.load(setting))
    before = [DOCTOR, AcceptStep("parity", compare_kernels, _PARITY_SENDS)]
    if not setting.on_npu:
        before.append(AcceptStep("hardware", measure_cpu, _PLANNER_SENDS))
    evaluation = AcceptStep("eval", lambda given: compare_logits(given, sizes), _EVAL_SENDS, server=True)
    load = AcceptStep("load", lambda given: load_beside_plan(given, sizes, workload), _PLANNER_SENDS, server=True)
    predicted = AcceptStep("plan", lambda given: predict(given, sizes), _PLANNER_SENDS, npu=False)
    return [*before, predicted], [SMOKE, evaluation, load, WATCH]


_PARITY_SENDS = (
    "to this project: accept.json and the output of glm5-ascend parity --device npu --json. Where only `npu` (the "
    "official operators) fails, also to Huawei's torch_npu: op, variant and the versions of CANN and torch_npu"
)
_EVAL_SENDS = (
    "to this project: accept.json, serve.log, and the output of glm5-ascend verify DIR. Where parity is ok, the "
    "engine's own operators differ: to vllm-ascend, with both"
)
_PLANNER_SENDS = (
    "to this project: accept.json; its figures become a row of plan --calibrate. Requests that failed: to the engine, "
    "with serve.log"
)


def compare_kernels(setting: Accepting) -> StepOutcome:
    """`parity --device npu` (cpu for the CPU's profile): every implementation that runs, against the reference."""
    from glm5_ascend.model.device import find_device
    from glm5_kernels import ops

    where = str(find_device("npu" if setting.on_npu else CPU))
    rows = list(ops.parity(where))
    figures: dict[str, Any] = {}
    for row in rows:
        of = figures.setdefault(row.implementation, {"results": 0, "failed": 0, "skipped": 0, "largest_relative": 0.0})
        of["skipped" if row.skipped else "results"] += 1
        of["failed"] += not row.ok
        of["largest_relative"] = max(of["largest_relative"], row.relative if row.relative < 1e30 else 1e30)
    failed = [f"{row.op} {row.implementation} {row.variant}: {row.worst}" for row in rows if not row.ok]
    done = sum(of["results"] for of in figures.values())
    if not done:
        return StepOutcome(FAILED, f"nothing but the reference runs on {where}", figures)
    ran = ", ".join(f"{name} {of['results']}" for name, of in figures.items())
    verdict = f"{done} results on {where} ({ran}), {len(failed)} failed" + (f": {failed[0]}" if failed else "")
    absent = [
        words for name, words in NPU_KERNELS.items() if setting.on_npu and not figures.get(name, {}).get("results")
    ]
    verdict += f"; nothing of {' and '.join(absent)} was compared" if absent else ""
    status = FAILED if failed else WARNING if absent else OK
    return StepOutcome(status, verdict, {"implementations": figures, "failed": failed[:20]})


def measure_cpu(setting: Accepting) -> StepOutcome:
    """`plan --measure`: this CPU as the planner's hardware. A machine too busy to be measured is no fault of it."""
    from glm5_ascend.plan.measure.describe import measure, summary, write

    try:
        found = measure(setting.directory, setting.folder / "measure.log", rounds=3)
    except CheckFailedError as error:
        return StepOutcome(WARNING, f"not measured: {error.message}", {"fix": error.tip})
    write(found, setting.folder / HARDWARE, replace=True)
    return StepOutcome(OK, next(iter(summary(found))), {"lines": list(summary(found))})


def compare_logits(setting: Accepting, sizes: AcceptSizes) -> StepOutcome:
    """`eval --url URL --against SRC`: the served log-probabilities against the reference on this CPU."""
    if setting.profile.engine == SGLANG:
        return StepOutcome(WARNING, "SGLang gives no log-probabilities of prompts: nothing was compared")
    found = evaluate(
        url=setting.server.url, against=sizes.against, window=sizes.window, windows=sizes.windows,
        model=setting.server.model, key=setting.key, metrics="kl,top1,flips,nll",
    )  # fmt: skip
    judged = found.verdict()
    status = {"good": OK, "fair": WARNING}.get(judged.grade, FAILED)
    figures = {row.name: row.value for row in found.rows}
    return StepOutcome(status, judged.text, {**figures, "grade": judged.grade, "threshold": judged.threshold})


def predict(setting: Accepting, sizes: AcceptSizes) -> StepOutcome:
    """`plan DIR` for the profile's machine, its layout and this load. No plan is no fault of a machine."""
    try:
        found = _planned(setting, sizes, None)
    except Glm5Error as error:
        return StepOutcome(WARNING, f"no plan: {error.message}", {"fix": error.tip})
    named = {name: found[name] for name in FIGURES}
    said = ", ".join(f"{name} {value['value']:g} [{value['low']:g}-{value['high']:g}]" for name, value in named.items())
    return StepOutcome(OK, said, {**named, "layout": found["layout"], "extrapolated": found["extrapolated"]})


def load_beside_plan(setting: Accepting, sizes: AcceptSizes, workload: Workload) -> StepOutcome:
    """The load, and the plan with the acceptance that was measured. Outside of its range is a warning: a speed is no
    fault, and the planner has never seen this machine."""
    concurrency = max(1, round(workload.concurrency))
    got = put_load(setting.server, workload.prompt, workload.output, concurrency, workload.requests or 2 * concurrency)
    if got.failed:
        return StepOutcome(
            FAILED, f"{got.failed} of {got.requests} requests failed: {got.said}", {"measured": got.to_dict()}
        )
    figures: dict[str, Any] = {"measured": got.to_dict()}
    try:
        found = _planned(setting, sizes, got.per_step)
    except Glm5Error as error:
        return StepOutcome(WARNING, f"{got.output_tokens_per_s:.1f} tokens/s; no plan: {error.message}", figures)
    outside, words = [], []
    for name in FIGURES:
        value, predicted = figures["measured"][name], found[name]
        words.append(
            f"{name} {value:.4g} (plan {predicted['value']:.4g} [{predicted['low']:.4g}-{predicted['high']:.4g}])"
        )
        if not predicted["low"] <= value <= predicted["high"]:
            outside.append(name)
    figures["predicted"] = {name: found[name] for name in FIGURES}
    more = f"; outside of the plan's range: {', '.join(outside)}" if outside else ""
    return StepOutcome(WARNING if outside else OK, f"{', '.join(words)}{more}", figures)


def _planned(setting: Accepting, sizes: AcceptSizes, per_step: float | None) -> dict[str, Any]:
    """What `plan --json` says of this profile. per_step: tokens per step as measured."""
    role, nodes = list(setting.profile.roles.values())[-1], int(setting.profile.hardware["nodes"])
    args = role.args
    drafts = int((args.get("speculative-config") or {}).get("num_speculative_tokens", 0))
    layout = None
    if len(setting.profile.roles) == 1 and "tensor-parallel-size" in args:
        layout = f"tp={args['tensor-parallel-size']},dp={args.get('data-parallel-size', 1)}"
    hardware = str(setting.profile.hardware["node"]).split(" or ")[0]
    if not setting.on_npu:
        hardware = str(setting.folder / HARDWARE)
        if not Path(hardware).is_file():
            raise CheckFailedError("this machine was not measured", "see the step hardware; --again repeats it")
    made = plan(
        setting.directory, hardware=hardware, nodes=nodes, workload=sizes.load(setting), mtp=drafts, layout=layout,
        acceptance=per_step if drafts == 3 else None,
    )  # fmt: skip
    return made.to_dict()
