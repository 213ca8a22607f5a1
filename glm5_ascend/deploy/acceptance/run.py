"""`glm5-ascend accept`: all steps in order, with one server for those that need it, and their report."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glm5_ascend import __version__
from glm5_ascend.deploy.acceptance import measurements, steps
from glm5_ascend.deploy.acceptance.steps import FAILED, NOT_RUN, OK, WARNING, Acceptance, AcceptStep, StepResult
from glm5_ascend.deploy.options import AcceptOptions
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, ConfigError, Glm5Error, MissingEnvironmentError, OutputError
from glm5_ascend.files.written import write_file
from glm5_ascend.plan.inputs import parse_workload
from glm5_ascend.report.header import make_header
from glm5_ascend.serve.activation import on_ascend
from glm5_ascend.serve.client import server_address
from glm5_ascend.serve.load_files import read_results
from glm5_ascend.serve.local_server import server
from glm5_ascend.serve.servable import check_directory

REPORT = "accept.json"
#: Time to load 400 GB from a slow disk and to capture graphs.
NPU_START_S = 5400.0
CPU_START_S = 1800.0
#: Files up to this size are hashed. Of shards only name and size are recorded; `verify` hashes them.
HASHED_BYTES = 32 * 1024**2


def accept(options: AcceptOptions, key: str, on_step: Callable[[StepResult], object]) -> tuple[Path, dict[str, Any]]:
    """Take all steps; a failed one does not end the others. Writes the report after each step.

    Args:
        key: API key of the server.
    Returns:
        (file, content of the report)
    Raises:
        ConfigError: unknown profile, or one with several servers and no URL. PlanError: a workload that cannot be read.
        MissingEnvironmentError: the profile needs another machine. OutputError: the report cannot be written.
    """
    acceptance = acceptance_of(options, key)
    path = acceptance.folder / REPORT
    try:
        acceptance.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{acceptance.folder}: {error.strerror}", "name another folder with --out") from None
    about, results, content = _about(acceptance), list[StepResult](), dict[str, Any]()
    first = [steps.DOCTOR, measurements.PARITY, *([] if acceptance.on_npu else [measurements.HARDWARE_STEP])]
    served = [steps.SMOKE, measurements.EVAL, measurements.LOAD, steps.WATCH]
    for result in run([*first, measurements.PLAN, *served], acceptance):
        results.append(result)
        content = {**report(results, simulated=acceptance.simulate), "about": about}
        content["steps"] = [asdict(step) for step in results]
        write_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        on_step(result)
    return path, content


def acceptance_of(options: AcceptOptions, key: str) -> Acceptance:
    """Check the options; see `accept` for the errors."""
    profile, checkpoint = load(options.profile), check_directory(Path(options.directory))
    runs = [] if options.results is None else read_results(Path(options.results))
    acceptance = Acceptance(
        checkpoint.directory,
        profile,
        Path(options.out or f"accept-{options.profile}"),
        url=server_address(options.url) if options.url else "",
        key=key,
        minutes=options.minutes,
        simulate=options.simulate_npu,
        against=None if options.against is None else Path(options.against),
        workload=options.workload,
        run=runs[-1] if runs else None,
        run_origin=f"run {len(runs)} of {len(runs)} in {options.results}: " if len(runs) > 1 else "",
    )
    if acceptance.run is not None and options.workload is not None:
        raise ConfigError("--workload and --results: the result says the workload", "leave --workload out")
    roles, elsewhere = list(profile.roles.values()), acceptance.url or acceptance.simulate
    if not elsewhere and (len(roles) > 1 or roles[0].nodes > 1 or roles[0].per_rank):
        raise ConfigError(
            f"profile {profile.name} has several servers, which one machine cannot start",
            "start them (glm5-ascend deploy render), and give the address of router or proxy with --url",
        )
    if not elsewhere and acceptance.on_npu and not on_ascend():
        raise MissingEnvironmentError(
            f"profile {profile.name} needs an Atlas with vllm-ascend, and this machine has none",
            "--simulate-npu skips the steps that need it; --profile cpu runs all steps on this CPU",
        )
    parse_workload(acceptance.load)
    return acceptance


def run(sequence: Sequence[AcceptStep], acceptance: Acceptance) -> Iterator[StepResult]:
    """Take the steps, first those that need no server, and yield their results.

    The other steps run after a failure, too. Without a server, steps that need it are not run.
    """
    for step in sequence:
        if not step.server:
            yield _result(step, acceptance)
    with ExitStack() as stack:
        yield _result(AcceptStep("serve", lambda it: stack.enter_context(_server(it)), steps.SERVE_SENDS), acceptance)
        for step in sequence:
            if step.server:
                yield _result(step, acceptance)


def report(results: Sequence[StepResult], *, simulated: bool) -> dict[str, Any]:
    """Head of the report; `accepted`: every step ran, none failed."""
    names = {status: [r.name for r in results if r.status == status] for status in (FAILED, WARNING, NOT_RUN)}
    accepted = not names[FAILED] and not names[NOT_RUN]
    ok = accepted or (simulated and not names[FAILED])
    outcome = "accepted" if accepted else "failed" if names[FAILED] else "not accepted"
    parts = [f"{status}: {', '.join(some)}" for status, some in names.items() if some]
    passed = len(results) - len(names[FAILED]) - len(names[NOT_RUN])
    header = make_header()
    return {
        "schema_version": 1, "command": "accept", "ok": ok, "exit_code": EXIT_OK if ok else EXIT_CHECK_FAILED,
        "accepted": accepted, "verdict": "; ".join([f"{outcome}: {passed} of {len(results)} steps passed", *parts]),
        "date": header.date.isoformat(timespec="seconds"), "command_line": header.command, "machine": header.machine,
        "versions": dict(header.versions), "seconds": round(sum(result.seconds for result in results), 1),
    }  # fmt: skip


def _about(acceptance: Acceptance) -> dict[str, Any]:
    files: list[dict[str, Any]] = []
    for path in sorted(item for item in acceptance.directory.iterdir() if item.is_file()):
        files.append({"name": path.name, "bytes": path.stat().st_size})
        if files[-1]["bytes"] <= HASHED_BYTES:
            files[-1]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "checkpoint": str(acceptance.directory.resolve()), "files": files, "profile": acceptance.profile.name,
        "engine": acceptance.profile.line.name,
        "against": str((acceptance.against or acceptance.directory).resolve()), "url": acceptance.url,
        "minutes": acceptance.minutes, "workload": acceptance.load,
        "windows": [acceptance.windows, acceptance.window], "simulated": acceptance.simulate, "version": __version__,
        "host": platform.node(),
    }  # fmt: skip


def _result(step: AcceptStep, acceptance: Acceptance) -> StepResult:
    """Run one step unless something is missing for it."""
    if acceptance.simulate and step.npu and acceptance.on_npu:
        return StepResult(NOT_RUN, "needs an NPU (--simulate-npu)", name=step.name)
    if step.server and acceptance.client is None:
        return StepResult(NOT_RUN, "no server runs: see serve", name=step.name)
    began, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    try:
        result = step.run(acceptance)
    except Glm5Error as error:
        result = StepResult(FAILED, error.message, {"fix": error.tip})
    except Exception as error:  # any error of the machine's software is a result of the step
        result = StepResult(FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:500])
    seconds, send = round(time.monotonic() - clock, 2), step.send if result.status == FAILED else ""
    return replace(result, name=step.name, seconds=seconds, began=began, send=send)


@contextmanager
def _server(acceptance: Acceptance) -> Iterator[StepResult]:
    """Start the profile's server, or connect to the given one."""
    if acceptance.url:
        yield steps.connect(acceptance)
        return
    began, log = time.monotonic(), acceptance.folder / "serve.log"
    options = ["--profile", acceptance.profile.name, "--host", "127.0.0.1"]
    limit = NPU_START_S if acceptance.on_npu else CPU_START_S
    with server(acceptance.directory, log, options=options, start_timeout=limit) as port:
        ready = round(time.monotonic() - began, 1)
        acceptance.url = f"http://127.0.0.1:{port}"
        result = steps.connect(acceptance)
        verdict = f"ready after {ready} s: serves {result.figures['model']}"
        yield StepResult(OK, verdict, {**result.figures, "seconds_to_ready": ready, "log": str(log)})
