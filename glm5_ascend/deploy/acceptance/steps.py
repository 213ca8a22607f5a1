"""The steps of an acceptance, in order: `STEPS`. Each is a function of the acceptance that returns a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.diagnosis.doctor import doctor
from glm5_ascend.deploy.diagnosis.machine import PROBLEM, WARNING
from glm5_ascend.deploy.options import AcceptOptions
from glm5_ascend.deploy.planning.ranks import engine_of
from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.engine_lines import CPU
from glm5_ascend.errors import EXIT_OK, Glm5Error, MissingEnvironmentError
from glm5_ascend.fidelity.api import run_evaluation
from glm5_ascend.fidelity.options import EvaluateOptions
from glm5_ascend.plan.api import plan
from glm5_ascend.plan.inputs import parse_workload
from glm5_ascend.plan.layout import Layout
from glm5_ascend.serve import smoke
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.load import run_load
from glm5_ascend.serve.local_server import server
from glm5_ascend.serve.watching.api import watch
from glm5_ascend.serve.watching.canaries import learn_canaries

OK, FAILED, NOT_RUN = "ok", "failed", "not run"
#: Time to load 400 GB from a slow disk and to capture graphs.
START_S = 5400.0
FIGURES = ("output_tokens_per_s", "tpot_ms", "ttft_ms")
NPU_LOAD, CPU_LOAD = "in=3500,out=1500,concurrency=16,requests=32", "in=256,out=64,concurrency=4,requests=12"


@dataclass
class Acceptance:
    """What is accepted, how, and what the steps leave for each other.

    Attributes:
        client: of the server; its model is named once `start_server` has reached it.
        here: false if the profile needs an NPU, no server is given, and this machine has none.
        stack: ends the server.
    """

    options: AcceptOptions
    profile: Profile
    client: Client
    here: bool = True
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def directory(self) -> Path:
        return Path(self.options.directory)

    @property
    def folder(self) -> Path:
        return Path(self.options.out or f"accept-{self.options.profile}")

    @property
    def load(self) -> str:
        """The workload of the load test."""
        return self.options.workload or (CPU_LOAD if self.profile.platform == CPU else NPU_LOAD)


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        status: OK, WARNING, FAILED or NOT_RUN. verdict: one line. figures: for the report.
        name, seconds, began (UTC, ISO 8601): set by `run`.
    """

    status: str
    verdict: str
    figures: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0
    began: str = ""


def run_doctor(acceptance: Acceptance) -> StepResult:
    """`doctor DIR --profile NAME`. Problems of a machine that is not the profile's do not count."""
    diagnosis = doctor(acceptance.directory, profile=acceptance.profile.name, role=next(iter(acceptance.profile.roles)))
    problems = diagnosis.of(PROBLEM)
    failed = any(acceptance.here or not row.of_machine for row in problems)
    status = FAILED if failed else WARNING if problems or diagnosis.of(WARNING) else OK
    return StepResult(status, diagnosis.verdict, {"rows": diagnosis.to_dict()["rows"]})


def compare_kernels(acceptance: Acceptance) -> StepResult:
    """`parity --device npu` (cpu for the CPU's profile): every implementation that runs, against the reference."""
    from glm5_ascend.model.device import find_device
    from glm5_kernels import ops

    device = str(find_device(acceptance.profile.platform))
    rows = list(ops.parity(device))
    results = Counter(row.implementation for row in rows if not row.skipped)
    failed = [f"{row.op} {row.implementation} {row.variant}: {row.worst}" for row in rows if not row.ok]
    absent = [] if device == CPU else sorted({"npu", "triton"} - results.keys())
    ran = ", ".join(f"{name} {count}" for name, count in results.items()) or "none but the reference's"
    verdict = f"results on {device}: {ran}; {len(failed)} failed" + (f": {failed[0]}" if failed else "")
    verdict += f"; nothing of {' and '.join(absent)} was compared" if absent else ""
    largest = max((row.relative for row in rows), default=0.0)
    figures = {"results": dict(results), "largest_relative": largest, "failed": failed[:20]}
    return StepResult(FAILED if failed or not results else WARNING if absent else OK, verdict, figures)


def predict(acceptance: Acceptance) -> StepResult:
    """`plan DIR` for the profile's machine, its layout and this load."""
    planned = _planned(acceptance)
    ranges = [f"{name} {x['value']:g} [{x['low']:g}-{x['high']:g}]" for name in FIGURES for x in [planned[name]]]
    figures = {name: planned[name] for name in (*FIGURES, "layout", "evidence", "nearest")}
    return StepResult(OK, ", ".join(ranges), figures)


def start_server(acceptance: Acceptance) -> StepResult:
    """`serve DIR --profile NAME` until the last step has ended, or the running server of --url."""
    client = acceptance.client
    if not client.url:
        options = ["--profile", acceptance.profile.name, "--host", "127.0.0.1"]
        started = server(acceptance.directory, acceptance.folder / "serve.log", options=options, start_timeout=START_S)
        client = replace(client, url=f"http://127.0.0.1:{acceptance.stack.enter_context(started)}")
    entry = client.entry()
    acceptance.client = replace(client, model=entry["id"])
    figures = {"model": entry["id"], "max_model_len": entry.get("max_model_len")}
    return StepResult(OK, f"{client.url} serves {entry['id']}, up to {figures['max_model_len']} tokens", figures)


def run_smoke(acceptance: Acceptance) -> StepResult:
    lines = smoke.run(acceptance.client)
    statuses = {line.status for line in lines}
    status = FAILED if not smoke.passes(lines) else WARNING if WARNING in statuses else OK
    figures = {line.check: {"status": line.status, "detail": line.detail, **line.values} for line in lines}
    return StepResult(status, smoke.verdict(lines), figures)


def evaluate_server(acceptance: Acceptance) -> StepResult:
    """`eval --url URL --against SRC`: the served log-probabilities against the reference on this CPU."""
    url, against = acceptance.client.url, acceptance.options.against or acceptance.directory
    options = EvaluateOptions(url=url, against=against, window=256, windows=8)
    report = run_evaluation(options, key=acceptance.client.key)
    verdict = report.verdict()
    status = {"good": OK, "fair": WARNING}.get(verdict.grade, FAILED)
    figures = {row.name: row.value for row in report.rows}
    return StepResult(status, verdict.text, {**figures, "grade": verdict.grade, "threshold": verdict.threshold})


def run_load_test(acceptance: Acceptance) -> StepResult:
    """The load; on an NPU compared with the plan for the measured acceptance: outside of its range is a warning."""
    load = parse_workload(acceptance.load)
    clients = max(1, round(load.concurrency))
    size = load.prompt, load.output, clients, load.requests or 2 * clients
    try:
        result = run_load(acceptance.client, acceptance.directory, *size)
    except MissingEnvironmentError as error:
        return StepResult(WARNING, error.message)
    measured = asdict(result)
    if result.failed:
        return StepResult(FAILED, f"{result.failed} of {size[-1]} requests failed", {"measured": measured})
    speed = f"{result.output_tokens_per_s:.1f} tokens/s"
    if acceptance.profile.platform == CPU:
        return StepResult(OK, speed, {"measured": measured})
    try:
        planned = _planned(acceptance, result.per_step)
    except Glm5Error as error:
        return StepResult(WARNING, f"{speed}; no plan: {error.message}", {"measured": measured})
    predicted = {name: planned[name] for name in FIGURES}
    texts = [f"{name} {measured[name]:.4g} (plan [{x['low']:.4g}-{x['high']:.4g}])" for name, x in predicted.items()]
    outside = [name for name, x in predicted.items() if not x["low"] <= measured[name] <= x["high"]]
    more = f"; outside of the plan's range: {', '.join(outside)}" if outside else ""
    figures = {"measured": measured, "predicted": predicted}
    return StepResult(WARNING if outside else OK, f"{', '.join(texts)}{more}", figures)


def run_watch(acceptance: Acceptance) -> StepResult:
    """`watch --learn`, then `watch` for the given minutes with a poll every ten seconds."""
    client, file = acceptance.client, acceptance.folder / "canaries.json"
    reference = learn_canaries(client.url, file, timeout=client.timeout, key=client.key)
    polls = max(2, round(acceptance.options.minutes * 6))
    report = watch(client.url, canaries=file, polls=polls, key=client.key, timeout=client.timeout)
    status = FAILED if report.exit_code != EXIT_OK or report.unreachable else WARNING if report.bad else OK
    return StepResult(status, report.verdict, report.to_dict() | {"canaries": len(reference.canaries)})


def _planned(acceptance: Acceptance, per_step: float = 0.0) -> dict[str, Any]:
    """The data of `plan --json` for the profile's layout. per_step: measured tokens per step, 0: not measured."""
    role, nodes = list(acceptance.profile.roles.values())[-1], int(acceptance.profile.hardware["nodes"])
    drafts = int((role.args.get("speculative-config") or {}).get("num_speculative_tokens", 0))
    single_engine = len(acceptance.profile.roles) == 1 and "tensor-parallel-size" in role.args
    layout = Layout(engine_of(role, acceptance.profile.line)).text() if single_engine else None
    hardware = str(acceptance.profile.hardware["node"])
    report = plan(
        acceptance.directory, hardware=hardware, nodes=nodes, workload=acceptance.load, mtp=drafts, layout=layout,
        acceptance=per_step or None if drafts == 3 else None,
    )  # fmt: skip
    return report.to_dict()


#: The step that only predicts: what it cannot is a warning. The planner knows no CPU.
PLAN = "plan"
#: Name, function, and whether the step needs the profile's machine, or its server.
NPU, SERVER = "npu", "server"
STEPS: tuple[tuple[str, Callable[[Acceptance], StepResult], str], ...] = (
    ("doctor", run_doctor, ""),
    ("parity", compare_kernels, NPU),
    (PLAN, predict, ""),
    ("serve", start_server, NPU),
    ("smoke", run_smoke, SERVER),
    ("eval", evaluate_server, SERVER),
    ("load", run_load_test, SERVER),
    ("watch", run_watch, SERVER),
)
