"""An acceptance, and its steps that call other commands of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.diagnosis.doctor import doctor
from glm5_ascend.deploy.diagnosis.row import PROBLEM
from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.engine_lines import CPU
from glm5_ascend.errors import EXIT_OK, MissingEnvironmentError
from glm5_ascend.serve import smoke
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.load import MeasuredLoad
from glm5_ascend.serve.watching.api import learn_canaries, watch

OK, WARNING, FAILED, NOT_RUN = "ok", "warning", "failed", "not run"
LONGEST_PROMPT = 8192
NPU_LOAD, CPU_LOAD = "in=3500,out=1500,concurrency=16,requests=32", "in=256,out=64,concurrency=4,requests=12"


@dataclass
class Acceptance:
    """What is accepted, how, and what the steps leave for each other.

    Attributes:
        directory: checkpoint. folder: for reports and logs.
        url: address of a running server; empty to start one. key: its API key.
        minutes: duration of the watch.
        simulate: the profile needs an NPU, and this machine has none.
        against: reference checkpoint of the evaluation; None: the checkpoint itself.
        workload: of the load test, as `plan --workload`; None: a usual one.
        run: load test that another tool made (`read_results`); None: this command makes one.
        run_origin: which run of a file of several it is, for the verdict; empty for the only one.
        windows, window: number and tokens of the windows of the evaluation.
        client: of the server while it runs.
    """

    directory: Path
    profile: Profile
    folder: Path
    url: str = ""
    key: str = ""
    minutes: float = 10.0
    simulate: bool = False
    against: Path | None = None
    workload: str | None = None
    run: MeasuredLoad | None = None
    run_origin: str = ""
    windows: int = 8
    window: int = 256
    client: Client | None = None

    @property
    def on_npu(self) -> bool:
        return self.profile.platform != CPU

    @property
    def load(self) -> str:
        """The workload of the load test."""
        if self.run is not None:
            return self.run.workload
        return self.workload or (NPU_LOAD if self.on_npu else CPU_LOAD)

    @property
    def server(self) -> Client:
        if self.client is None:
            raise MissingEnvironmentError("no server runs", "see the step serve")
        return self.client


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        status: OK, WARNING, FAILED or NOT_RUN. verdict: one line. figures: for the report.
        name, seconds, began (UTC, ISO 8601): set by `run`. send: where to report a failure, and with which files.
    """

    status: str
    verdict: str
    figures: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0
    began: str = ""
    send: str = ""


@dataclass(frozen=True)
class AcceptStep:
    """A step. npu: needs the profile's machine; server: needs its server; send: where to report a failure."""

    name: str
    run: Callable[[Acceptance], StepResult]
    send: str
    npu: bool = True
    server: bool = False


def run_doctor(acceptance: Acceptance) -> StepResult:
    """`doctor DIR --profile NAME`. With `simulate`, problems of the machine do not count."""
    diagnosis = doctor(acceptance.directory, profile=acceptance.profile.name, role=next(iter(acceptance.profile.roles)))
    rows = [{"item": row.item, "value": row.value, "status": row.status, "note": row.note} for row in diagnosis.rows]
    problems = [row for row in diagnosis.rows if row.status == PROBLEM]
    if acceptance.simulate:
        problems = [row for row in problems if row.id or row.item == "checkpoint"]
    warned = diagnosis.exit_code != EXIT_OK or any(row["status"] == "warning" for row in rows)
    return StepResult(FAILED if problems else WARNING if warned else OK, diagnosis.verdict, {"rows": rows})


def run_smoke(acceptance: Acceptance) -> StepResult:
    """`smoke URL`."""
    longest = acceptance.server.entry().get("max_model_len") or 2 * LONGEST_PROMPT
    lines = smoke.run(acceptance.server, min(LONGEST_PROMPT, longest // 2))
    statuses = {line.status for line in lines}
    status = FAILED if smoke.FAILED in statuses else WARNING if smoke.WARNING in statuses else OK
    figures = {line.check: {"status": line.status, "detail": line.detail, **line.values} for line in lines}
    return StepResult(status, smoke.verdict(lines), figures)


def run_watch(acceptance: Acceptance) -> StepResult:
    """`watch --learn`, then `watch` for the given minutes with a poll every ten seconds."""
    client, file = acceptance.server, acceptance.folder / "canaries.json"
    reference = learn_canaries(client.url, file, model=client.model, timeout=client.timeout, key=client.key)
    polls = max(2, round(acceptance.minutes * 6))
    report = watch(client.url, canaries=file, polls=polls, model=client.model, key=client.key, timeout=client.timeout)
    status = OK if report.exit_code == EXIT_OK and not report.unreachable else FAILED
    figures = report.to_dict() | {
        "canaries": len(reference.canaries), "learnt_tokens_per_step": reference.tokens_per_step
    }  # fmt: skip
    return StepResult(status, report.verdict, figures)


def connect(acceptance: Acceptance) -> StepResult:
    """Ask the server at `acceptance.url` for its model, and set `acceptance.client`."""
    client = Client(acceptance.url, timeout=1800.0, key=acceptance.key)
    entry = client.entry()
    acceptance.client = replace(client, model=entry["id"])
    figures = {"model": entry["id"], "max_model_len": entry.get("max_model_len")}
    return StepResult(OK, f"{acceptance.url} serves {entry['id']}, up to {entry.get('max_model_len')} tokens", figures)


DOCTOR = AcceptStep(
    "doctor", run_doctor, "nothing to send: each row names its fix. If a row is wrong: to this project, with the "
    "output of glm5-ascend doctor DIR --profile NAME --json", npu=False,
)  # fmt: skip
SMOKE = AcceptStep(
    "smoke", run_smoke, "to this project: accept.json and serve.log. If verify DIR is clean and eval is close, parsers "
    "or templates are at fault: to the engine (vllm-ascend or SGLang), with the raw answer",
    server=True,
)  # fmt: skip
WATCH = AcceptStep(
    "watch", run_watch, "to the engine (vllm-ascend or SGLang): the finding, serve.log from its time on, and the "
    "profile's command line; to this project: accept.json and canaries.json", server=True,
)  # fmt: skip
SERVE_SENDS = (
    "the last error of serve.log decides: a traceback in vllm_ascend, torch_npu or CANN goes to vllm-ascend with "
    "serve.log and the versions of accept.json; one in glm5_ascend goes to this project with both files"
)
