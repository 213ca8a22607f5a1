"""All steps of an acceptance, in order, with one server for those that need it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from glm5_ascend.deploy.acceptance.journal import FAILED, NOT_RUN, OK, AcceptanceJournal, StepResult
from glm5_ascend.deploy.acceptance.measurements import EVAL, HARDWARE_STEP, LOAD, PARITY, PLAN
from glm5_ascend.deploy.acceptance.steps import (
    DOCTOR,
    SERVE_SENDS,
    SMOKE,
    WATCH,
    Accepting,
    AcceptStep,
    StepOutcome,
    connect,
)
from glm5_ascend.errors import ConfigError, Glm5Error
from glm5_ascend.plan.workload import parse_workload
from glm5_ascend.serve.local_server import server

SERVE = "serve"
#: Time to load 400 GB from a slow disk and to capture graphs.
NPU_START_S = 5400.0
CPU_START_S = 1800.0
OnStep = Callable[[StepResult], object]


def check_profile(setting: Accepting) -> None:
    """Raises `ConfigError` if the profile has several servers: they cannot be started from one machine."""
    roles = list(setting.profile.roles.values())
    if not setting.url and not setting.simulate and (len(roles) > 1 or roles[0].nodes > 1 or roles[0].per_rank):
        raise ConfigError(
            f"profile {setting.profile.name} has several servers, which one machine cannot start",
            "start them (glm5-ascend deploy render), and give the address of router or proxy with --url",
        )


def accept_steps(setting: Accepting) -> list[AcceptStep]:
    """All steps in order. Raises PlanError for a workload that cannot be read."""
    parse_workload(setting.load)
    return [DOCTOR, PARITY, *([] if setting.on_npu else [HARDWARE_STEP]), PLAN, SMOKE, EVAL, LOAD, WATCH]


def run(
    setting: Accepting, steps: Sequence[AcceptStep], journal: AcceptanceJournal, on_step: OnStep
) -> list[StepResult]:
    """Run the steps that the journal does not have, first those that need no server.

    The other steps run after a failure, too. Without a server, steps that need it are not run.
    """
    before = [step for step in steps if not step.server]
    served = [step for step in steps if step.server]
    for step in before:
        _take(setting, step, journal, on_step)
    pending = [step for step in served if not _is_done(step.name, journal)]
    if SERVE in journal.results and not pending:
        on_step(journal.results[SERVE])
    with ExitStack() as stack:
        if pending or SERVE not in journal.results:
            start = AcceptStep(SERVE, lambda setting: stack.enter_context(_server(setting)), SERVE_SENDS)
            journal.results.pop(SERVE, None)
            _take(setting, start, journal, on_step)
        for step in served:
            _take(setting, step, journal, on_step)
    return [journal.results[name] for name in (*[s.name for s in before], SERVE, *[s.name for s in served])]


def _is_done(name: str, journal: AcceptanceJournal) -> bool:
    return name in journal.results and journal.results[name].done


def _take(setting: Accepting, step: AcceptStep, journal: AcceptanceJournal, on_step: OnStep) -> None:
    """Run one step unless it is done or cannot be run."""
    if not _is_done(step.name, journal):
        why = _obstacle(setting, step)
        journal.add(StepResult(step.name, NOT_RUN, why) if why else _result(setting, step))
    on_step(journal.results[step.name])


def _obstacle(setting: Accepting, step: AcceptStep) -> str:
    """The reason why a step cannot be run; empty if it can."""
    if setting.simulate and step.npu and setting.on_npu:
        return "needs an NPU (--simulate-npu)"
    return "no server runs: see serve" if step.server and setting.client is None else ""


def _result(setting: Accepting, step: AcceptStep) -> StepResult:
    began, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    try:
        outcome = step.run(setting)
    except Glm5Error as error:
        outcome = StepOutcome(FAILED, error.message, {"fix": error.tip})
    except Exception as error:  # any error of the machine's software is a result of the step
        outcome = StepOutcome(FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:500])
    seconds = round(time.monotonic() - clock, 2)
    send = step.send if outcome.status == FAILED else ""
    return StepResult(step.name, outcome.status, outcome.verdict, seconds, began, outcome.figures, send)


@contextmanager
def _server(setting: Accepting) -> Iterator[StepOutcome]:
    """Start the profile's server, or connect to the given one."""
    if setting.url:
        yield connect(setting)
        return
    began, log = time.monotonic(), setting.folder / "serve.log"
    options = ["--profile", setting.profile.name, "--host", "127.0.0.1"]
    limit = NPU_START_S if setting.on_npu else CPU_START_S
    with server(setting.directory, log, options=options, start_timeout=limit) as port:
        ready = round(time.monotonic() - began, 1)
        setting.url = f"http://127.0.0.1:{port}"
        try:
            outcome = connect(setting)
            verdict = f"ready after {ready} s: serves {outcome.figures['model']}"
            yield StepOutcome(OK, verdict, {**outcome.figures, "seconds_to_ready": ready, "log": str(log)})
        finally:
            setting.url, setting.client = "", None
