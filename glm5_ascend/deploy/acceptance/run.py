"""All steps of an acceptance, in order, with one server for those that need it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from glm5_ascend.deploy.acceptance.journal import FAILED, NOT_RUN, OK, AcceptanceJournal, StepResult
from glm5_ascend.deploy.acceptance.steps import SERVE_SENDS, Accepting, AcceptStep, StepOutcome, describe_server
from glm5_ascend.errors import ConfigError, Glm5Error
from glm5_ascend.serve.local_server import server

SERVE = "serve"
#: 400 GB from a slow disk, and graphs to capture.
NPU_START_S = 5400.0
CPU_START_S = 1800.0
OnStep = Callable[[StepResult], object]


def check_profile(setting: Accepting) -> None:
    """Raises `ConfigError` where the profile has several servers, which nobody can start from one machine."""
    roles = list(setting.profile.roles.values())
    if not setting.url and not setting.simulate and (len(roles) > 1 or roles[0].nodes > 1 or roles[0].per_rank):
        raise ConfigError(
            f"profile {setting.profile.name} has several servers, which one machine cannot start",
            "start them (glm5-ascend deploy render), and give the address of router or proxy with --url",
        )


def run(
    setting: Accepting, before: Sequence[AcceptStep], served: Sequence[AcceptStep], journal: AcceptanceJournal,
    on_step: OnStep,
) -> list[StepResult]:  # fmt: skip
    """Steps `before` the server and those with it; what the journal has is not repeated.

    A step that fails does not keep the others from running; without a server those that need it are not run.
    """
    for step in before:
        _take(setting, step, journal, on_step)
    pending = [step for step in served if not _kept(step.name, journal)]
    if SERVE in journal.results and not pending:
        on_step(journal.results[SERVE])
    with ExitStack() as stack:
        if pending or SERVE not in journal.results:
            start = AcceptStep(SERVE, lambda given: stack.enter_context(_server(given)), SERVE_SENDS)
            journal.results.pop(SERVE, None)
            _take(setting, start, journal, on_step)
        for step in served:
            _take(setting, step, journal, on_step)
    return [journal.results[name] for name in (*[s.name for s in before], SERVE, *[s.name for s in served])]


def _kept(name: str, journal: AcceptanceJournal) -> bool:
    return name in journal.results and journal.results[name].done


def _take(setting: Accepting, step: AcceptStep, journal: AcceptanceJournal, on_step: OnStep) -> None:
    """Run one step unless it is done, or cannot be run."""
    if not _kept(step.name, journal):
        why = _obstacle(setting, step)
        journal.add(StepResult(step.name, NOT_RUN, why) if why else _result(setting, step))
    on_step(journal.results[step.name])


def _obstacle(setting: Accepting, step: AcceptStep) -> str:
    """Why a step cannot be run; empty where it can."""
    if setting.simulate and step.npu and setting.on_npu:
        return "needs an NPU (--simulate-npu)"
    return "no server runs: see serve" if step.server and setting.client is None else ""


def _result(setting: Accepting, step: AcceptStep) -> StepResult:
    began, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    try:
        outcome = step.run(setting)
    except Glm5Error as error:
        outcome = StepOutcome(FAILED, error.message, {"fix": error.tip})
    except Exception as error:  # of whatever the machine has: a finding, not the end of the hour
        outcome = StepOutcome(FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:500])
    seconds = round(time.monotonic() - clock, 2)
    send = step.send if outcome.status == FAILED else ""
    return StepResult(step.name, outcome.status, outcome.verdict, seconds, began, outcome.figures, send)


@contextmanager
def _server(setting: Accepting) -> Iterator[StepOutcome]:
    """The profile's server, or the one that is there; how long it took to answer."""
    if setting.url:
        yield describe_server(setting)
        return
    began, log = time.monotonic(), setting.folder / "serve.log"
    options = ["--profile", setting.profile.name, "--host", "127.0.0.1"]
    limit = NPU_START_S if setting.on_npu else CPU_START_S
    with server(setting.directory, log, options=options, start_timeout=limit) as port:
        ready = round(time.monotonic() - began, 1)
        setting.url = f"http://127.0.0.1:{port}"
        try:
            found = describe_server(setting)
            verdict = f"ready after {ready} s: serves {found.figures['model']}"
            yield StepOutcome(OK, verdict, {**found.figures, "seconds_to_ready": ready, "log": str(log)})
        finally:
            setting.url, setting.client = "", None
