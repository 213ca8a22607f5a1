"""`glm5-ascend accept`: all steps in order, and their report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.output import sha256
from glm5_ascend.deploy.acceptance.steps import FAILED, NOT_RUN, NPU, PLAN, SERVER, STEPS, Acceptance, StepResult
from glm5_ascend.deploy.diagnosis.machine import WARNING
from glm5_ascend.deploy.options import AcceptOptions
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.engine_lines import CPU
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_OK, ConfigError, Glm5Error, json_frame
from glm5_ascend.files.written import disk_error, write_file
from glm5_ascend.plan.inputs import parse_workload
from glm5_ascend.report import origin
from glm5_ascend.serve.client import Client, server_address
from glm5_ascend.serve.environment import on_ascend
from glm5_ascend.serve.servable import check_directory

#: Seconds for one answer of the server.
ANSWER_S = 1800.0
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
        OutputError: the report cannot be written.
    """
    acceptance = acceptance_of(options, key)
    path = acceptance.folder / "accept.json"
    try:
        acceptance.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(acceptance.folder, error) from None
    about, results, content = _about(acceptance), list[StepResult](), dict[str, Any]()
    for result in run(acceptance):
        results.append(result)
        content = {**report(results, acceptance.here), "about": about, "steps": [asdict(step) for step in results]}
        write_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        on_step(result)
    return path, content


def acceptance_of(options: AcceptOptions, key: str) -> Acceptance:
    """Check the options; see `accept` for the errors."""
    profile, url = load(options.profile), options.url and server_address(options.url)
    check_directory(Path(options.directory))
    here = bool(url) or profile.platform == CPU or on_ascend()
    acceptance = Acceptance(options, profile, Client(url, timeout=ANSWER_S, key=key), here)
    roles = list(profile.roles.values())
    if here and not url and (len(roles) > 1 or roles[0].nodes > 1 or roles[0].per_rank):
        raise ConfigError(
            f"profile {profile.name} has several servers, which one machine cannot start",
            "start them (glm5-ascend deploy render), and give the address of router or proxy with --url",
        )
    parse_workload(acceptance.load)
    return acceptance


def run(acceptance: Acceptance) -> Iterator[StepResult]:
    """Take the steps and yield their results. After a failure the others run, too, but none without what it needs."""
    with acceptance.stack:
        for name, function, need in STEPS:
            if name != PLAN or acceptance.profile.platform != CPU:
                yield _result(name, function, need, acceptance)


def report(results: Sequence[StepResult], here: bool) -> dict[str, Any]:
    """Head of the report; `accepted`: every step ran, none failed. here: this is the profile's machine."""
    names = {status: [r.name for r in results if r.status == status] for status in (FAILED, WARNING, NOT_RUN)}
    accepted = not names[FAILED] and not names[NOT_RUN]
    outcome = "accepted" if accepted else "failed" if names[FAILED] else "not accepted"
    code = EXIT_OK if accepted else EXIT_CHECK_FAILED if names[FAILED] or here else EXIT_ENVIRONMENT
    lists = [f"{status}: {', '.join(some)}" for status, some in names.items() if some]
    passed = len(results) - len(names[FAILED]) - len(names[NOT_RUN])
    return json_frame("accept", code) | {
        "accepted": accepted, "verdict": "; ".join([f"{outcome}: {passed} of {len(results)} steps passed", *lists]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "command_line": origin.command_line(),
        "machine": origin.machine(), "versions": origin.versions(),
        "seconds": round(sum(result.seconds for result in results), 1),
    }  # fmt: skip


def _about(acceptance: Acceptance) -> dict[str, Any]:
    files: list[dict[str, Any]] = []
    for path in sorted(item for item in acceptance.directory.iterdir() if item.is_file()):
        files.append({"name": path.name, "bytes": path.stat().st_size})
        if files[-1]["bytes"] <= HASHED_BYTES:
            files[-1]["sha256"] = sha256(path)
    return {
        "checkpoint": str(acceptance.directory.resolve()), "files": files, "profile": acceptance.profile.name,
        "against": str(acceptance.options.against or acceptance.directory), "url": acceptance.options.url,
        "minutes": acceptance.options.minutes, "workload": acceptance.load,
    }  # fmt: skip


def _result(name: str, function: Callable[[Acceptance], StepResult], need: str, acceptance: Acceptance) -> StepResult:
    if need in (NPU, SERVER) and not acceptance.here:
        return StepResult(NOT_RUN, "needs an Atlas with vllm-ascend, which this machine is not", name=name)
    if need == SERVER and not acceptance.client.model:
        return StepResult(NOT_RUN, "no server runs: see serve", name=name)
    began, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    try:
        result = function(acceptance)
    except Glm5Error as error:
        result = StepResult(WARNING if name == PLAN else FAILED, error.message, {"fix": error.tip})
    except Exception as error:  # any error of the machine's software is a result of the step
        result = StepResult(FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:500])
    return replace(result, name=name, seconds=round(time.monotonic() - clock, 2), began=began)
