"""`glm5-ascend accept DIR --profile NAME`: the first hour on a machine."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm5_ascend import __version__
from glm5_ascend.cli.help import SHOWN
from glm5_ascend.cli.help import command as add_command
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, MissingEnvironmentError, OutputError, printable

if TYPE_CHECKING:
    from glm5_ascend.deploy.acceptance.journal import StepResult
    from glm5_ascend.deploy.acceptance.steps import Accepting


def register(app: typer.Typer) -> None:
    add_command(
        app, "accept", accept,
        "accept glm5-w4a8 --profile a3-single-w4a8 --against GLM-5",
        "accept glm5-w4a8 --profile cpu --minutes 1",
        "accept glm5-w4a8 --profile a3-single-w4a8 --simulate-npu",
    )  # fmt: skip


def accept(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint to serve.")],
    profile: Annotated[str, typer.Option(metavar="NAME", help="Deploy profile; `deploy list` shows them.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="SRC", show_default="DIR itself", help="Reference of eval, computed on this CPU."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", show_default="accept-PROFILE", help="For the reports and the log.")
    ] = None,
    url: Annotated[str, typer.Option(metavar="URL", help="A server that runs already; else it is started.")] = "",
    minutes: Annotated[float, typer.Option(min=0, max=1440, help="Of the watch.")] = 10.0,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            show_default="the planner's; small on a CPU",
            help="Of the load test: in=,out=,concurrency=,requests=.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of eval, at most.")] = 8,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 256,
    simulate_npu: Annotated[
        bool, typer.Option("--simulate-npu", help="No NPU here: steps that need one are marked 'not run'.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Repeat the steps that are done, too.")] = False,
    key: Annotated[
        str, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="API key, if the server wants one.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The report on stdout, too.", rich_help_panel=SHOWN)] = False,
) -> int:
    """The first hour on a machine: doctor, parity, serve, smoke, eval, a load beside the plan, watch. Resumable."""
    import glm5_ascend.cli.accept_page as accept_page
    from glm5_ascend.deploy.acceptance.journal import AcceptanceJournal, file_list
    from glm5_ascend.deploy.acceptance.run import accept_steps, check_profile, run
    from glm5_ascend.deploy.acceptance.steps import Accepting
    from glm5_ascend.deploy.profiles.load import load
    from glm5_ascend.report.header import make_header
    from glm5_ascend.serve.client import server_address
    from glm5_ascend.serve.servable import check_directory

    chosen, checkpoint = load(profile), check_directory(directory)
    folder = out or Path(f"accept-{profile}")
    setting = Accepting(
        checkpoint.directory,
        chosen,
        folder,
        server_address(url) if url else "",
        key,
        minutes,
        simulate_npu,
        against,
        workload,
        windows,
        window,
    )
    check_profile(setting)
    _require_machine(setting)
    steps = accept_steps(setting)
    _make(folder)
    about: dict[str, Any] = {
        "checkpoint": str(checkpoint.directory.resolve()), "files": file_list(checkpoint.directory), "profile": profile,
        "engine": chosen.line.name, "against": str((against or directory).resolve()), "url": setting.url,
        "minutes": minutes, "workload": setting.load, "windows": [windows, window], "simulated": simulate_npu,
        "version": __version__, "host": platform.node(),
    }  # fmt: skip
    accept_page.check_place(folder)
    journal = AcceptanceJournal(folder, about, again=again)
    results = run(setting, steps, journal, quiet if as_json else show)
    header = make_header()
    report = accept_page.report(results, header, simulated=simulate_npu)
    journal.write(report)
    accept_page.write(folder, results, header, about, report)
    if as_json:
        print(json.dumps({**report, "about": about, "steps": [result.__dict__ for result in results]}))
    else:
        print(printable(report["verdict"]))
        print(printable(f"wrote {journal.path} and {folder / accept_page.NAME}"))
    return EXIT_OK if report["ok"] else EXIT_CHECK_FAILED


def _require_machine(setting: Accepting) -> None:
    from glm5_ascend.serve.activation import on_ascend

    if setting.on_npu and not setting.simulate and not setting.url and not on_ascend():
        raise MissingEnvironmentError(
            f"profile {setting.profile.name} needs an Atlas with vllm-ascend, and this machine has none",
            "--simulate-npu does the rest, --profile cpu all of it on this CPU",
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror}", "name another folder with --out") from None


def show(result: StepResult) -> None:
    """A line per step, and what to send whom where it failed."""
    print(printable(f"{result.name:<9} {result.status:<8} {result.seconds:>7.1f} s  {result.verdict}"), flush=True)
    if result.send:
        print(printable(f"          send: {result.send}"), flush=True)


def quiet(result: StepResult) -> None:
    """With --json stdout is one object."""
