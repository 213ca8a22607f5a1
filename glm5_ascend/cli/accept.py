"""`glm5-ascend accept DIR --profile NAME`: the acceptance test of a machine."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from glm5_ascend import __version__
from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.deploy.options import AcceptOptions
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, MissingEnvironmentError, OutputError, printable

if TYPE_CHECKING:
    from glm5_ascend.deploy.acceptance.journal import StepResult
    from glm5_ascend.deploy.acceptance.steps import Accepting


def register(app: typer.Typer) -> None:
    add_command(
        app, "accept", run,
        "accept glm5-w4a8 --profile a3-single-w4a8 --against GLM-5",
        "accept glm5-w4a8 --profile cpu --minutes 1",
        "accept glm5-w4a8 --profile a3-single-w4a8 --simulate-npu",
        json="Also print the report as JSON on stdout.",
    )  # fmt: skip


def run(options: AcceptOptions, output: Output) -> int:
    """Accept a machine: doctor, parity, serve, smoke, eval, load test against the plan, watch. Resumable.

    Remove the directory of an earlier run to repeat its steps. OPENAI_API_KEY is the server's API key, if it needs one.
    """
    import glm5_ascend.cli.accept_page as accept_page
    from glm5_ascend.deploy.acceptance.journal import AcceptanceJournal
    from glm5_ascend.deploy.acceptance.run import accept_steps, check_profile
    from glm5_ascend.deploy.acceptance.run import run as run_steps
    from glm5_ascend.report.header import make_header

    setting = _setting(options)
    check_profile(setting)
    _require_machine(setting)
    steps = accept_steps(setting)
    _create(setting.folder)
    about = _about(setting)
    accept_page.check_path(setting.folder)
    journal = AcceptanceJournal(setting.folder, about)
    results = run_steps(setting, steps, journal, _silent if output.json else _show)
    header = make_header()
    report = accept_page.report(results, header, simulated=options.simulate_npu)
    journal.write(report)
    accept_page.write(setting.folder, results, header, about, report)
    if output.json:
        print(json.dumps({**report, "about": about, "steps": [result.__dict__ for result in results]}))
    else:
        print(printable(report["verdict"]))
        print(printable(f"wrote {journal.path} and {setting.folder / accept_page.NAME}"))
    return EXIT_OK if report["ok"] else EXIT_CHECK_FAILED


def _setting(options: AcceptOptions) -> Accepting:
    from glm5_ascend.deploy.acceptance.steps import Accepting
    from glm5_ascend.deploy.profiles.load import load
    from glm5_ascend.serve.client import server_address
    from glm5_ascend.serve.servable import check_directory

    profile, checkpoint = load(options.profile), check_directory(Path(options.directory))
    return Accepting(
        checkpoint.directory,
        profile,
        Path(options.out or f"accept-{options.profile}"),
        url=server_address(options.url) if options.url else "",
        key=os.environ.get("OPENAI_API_KEY", ""),
        minutes=options.minutes,
        simulate=options.simulate_npu,
        against=None if options.against is None else Path(options.against),
        workload=options.workload,
    )


def _about(setting: Accepting) -> dict[str, Any]:
    from glm5_ascend.deploy.acceptance.journal import file_list

    return {
        "checkpoint": str(setting.directory.resolve()), "files": file_list(setting.directory),
        "profile": setting.profile.name, "engine": setting.profile.line.name,
        "against": str((setting.against or setting.directory).resolve()), "url": setting.url,
        "minutes": setting.minutes, "workload": setting.load, "windows": [setting.windows, setting.window],
        "simulated": setting.simulate, "version": __version__, "host": platform.node(),
    }  # fmt: skip


def _require_machine(setting: Accepting) -> None:
    from glm5_ascend.serve.activation import on_ascend

    if setting.on_npu and not setting.simulate and not setting.url and not on_ascend():
        raise MissingEnvironmentError(
            f"profile {setting.profile.name} needs an Atlas with vllm-ascend, and this machine has none",
            "--simulate-npu skips the steps that need it; --profile cpu runs all steps on this CPU",
        )


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror}", "name another folder with --out") from None


def _show(result: StepResult) -> None:
    print(printable(f"{result.name:<9} {result.status:<8} {result.seconds:>7.1f} s  {result.verdict}"), flush=True)
    if result.send:
        print(printable(f"          send: {result.send}"), flush=True)


def _silent(result: StepResult) -> None:
    """Print nothing: with --json stdout is one object."""
