"""The steps of an acceptance that need nothing above this package; each is a function of the setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.acceptance.journal import FAILED, OK, WARNING
from glm5_ascend.deploy.diagnosis.doctor import doctor
from glm5_ascend.deploy.diagnosis.row import PROBLEM
from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.errors import EXIT_OK, MissingEnvironmentError
from glm5_ascend.serve import smoke
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.watching.api import learn_canaries, watch

LONGEST_PROMPT = 8192
CPU = "cpu"


@dataclass
class Accepting:
    """What is accepted, and what the steps leave for each other.

    Attributes:
        folder: of the reports and logs. url: of a server that is there already, "" to start one.
        minutes: of the watch. simulate: this machine has no NPU, and the profile is for one.
        client: of the server, while there is one.
    """

    directory: Path
    profile: Profile
    folder: Path
    url: str = ""
    key: str = ""
    minutes: float = 10.0
    simulate: bool = False
    client: Client | None = None

    @property
    def on_npu(self) -> bool:
        return self.profile.platform != CPU

    @property
    def server(self) -> Client:
        if self.client is None:
            raise MissingEnvironmentError("no server runs", "see the step serve")
        return self.client


@dataclass(frozen=True)
class StepOutcome:
    """status: OK, WARNING or FAILED; verdict: one line."""

    status: str
    verdict: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AcceptStep:
    """npu: needs the machine of the profile. server: needs its server. send: what to send whom where it fails."""

    name: str
    run: Callable[[Accepting], StepOutcome]
    send: str
    npu: bool = True
    server: bool = False


def check_machine(setting: Accepting) -> StepOutcome:
    """`doctor DIR --profile NAME`. What only an NPU's machine has is no failure where none is meant to be."""
    found = doctor(setting.directory, profile=setting.profile.name, role=next(iter(setting.profile.roles)))
    rows = [{"item": row.item, "value": row.value, "status": row.status, "note": row.note} for row in found.rows]
    bad = [row for row in found.rows if row.status == PROBLEM]
    if setting.simulate:
        bad = [row for row in bad if row.id or row.item == "checkpoint"]
    warned = found.exit_code != EXIT_OK or any(row["status"] == "warning" for row in rows)
    return StepOutcome(FAILED if bad else WARNING if warned else OK, found.verdict, {"rows": rows})


def ask_sensibly(setting: Accepting) -> StepOutcome:
    """`smoke URL`."""
    longest = setting.server.entry().get("max_model_len") or 2 * LONGEST_PROMPT
    lines = smoke.run(setting.server, smoke.SmokeBounds(min(LONGEST_PROMPT, longest // 2)))
    statuses = {line.status for line in lines}
    status = FAILED if smoke.FAILED in statuses else WARNING if smoke.WARNING in statuses else OK
    figures = {line.check: {"status": line.status, "detail": line.detail, **line.values} for line in lines}
    return StepOutcome(status, smoke.verdict(lines), figures)


def watch_it(setting: Accepting) -> StepOutcome:
    """`watch --learn`, then `watch` for the minutes asked for, a poll every ten seconds."""
    client, file = setting.server, setting.folder / "canaries.json"
    learnt = learn_canaries(client.url, file, model=client.model, timeout=client.timeout, key=client.key)
    polls = max(2, round(setting.minutes * 6))
    report = watch(client.url, canaries=file, polls=polls, model=client.model, key=client.key, timeout=client.timeout)
    status = OK if report.exit_code == EXIT_OK and not report.unreachable else FAILED
    figures = {**report.to_dict(), "canaries": len(learnt.canaries), "learnt_tokens_per_step": learnt.tokens_per_step}
    return StepOutcome(status, report.verdict, figures)


def describe_server(setting: Accepting) -> StepOutcome:
    """What the server says of itself; sets the setting's client."""
    client = Client(setting.url, timeout=1800.0, key=setting.key)
    entry = client.entry()
    setting.client = replace(client, model=entry["id"])
    figures = {"model": entry["id"], "max_model_len": entry.get("max_model_len")}
    return StepOutcome(OK, f"{setting.url} serves {entry['id']}, up to {entry.get('max_model_len')} tokens", figures)


DOCTOR = AcceptStep(
    "doctor", check_machine, "nothing to send: each row names what mends it. A row that is wrong: this project, with "
    "the output of glm5-ascend doctor DIR --profile NAME --json", npu=False,
)  # fmt: skip
SMOKE = AcceptStep(
    "smoke", ask_sensibly, "to this project: accept.json and serve.log. Where verify DIR is clean and eval is close, "
    "parsers and templates are at fault: to the engine (vllm-ascend or SGLang), with the answer as it came",
    server=True,
)  # fmt: skip
WATCH = AcceptStep(
    "watch", watch_it, "to the engine (vllm-ascend or SGLang): the finding, serve.log from its time on, and the "
    "profile's command line; to this project: accept.json and canaries.json", server=True,
)  # fmt: skip
SERVE_SENDS = (
    "the last error of serve.log decides: a traceback in vllm_ascend, torch_npu or CANN goes to vllm-ascend with "
    "serve.log and the versions of accept.json; one in glm5_ascend goes to this project with both files"
)
