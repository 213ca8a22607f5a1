"""`glm5-ascend watch URL`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.errors import EXIT_OK, printable
from glm5_ascend.serve.options import WatchCommandOptions, WatchOptions

if TYPE_CHECKING:
    from glm5_ascend.serve.watching.judge import WatchState


def register(app: typer.Typer) -> None:
    add_command(
        app, "watch", run,
        "watch http://127.0.0.1:8000 --learn canaries.json",
        "watch http://127.0.0.1:8000 --canaries canaries.json",
        "watch http://127.0.0.1:8000 --once",
        json="One JSON object at the end.",
    )  # fmt: skip


def run(options: WatchCommandOptions, output: Output) -> int:
    """Watch a server for garbage: known questions, log-probabilities, repeats, empty tool calls, MTP acceptance."""
    from glm5_ascend.serve.watching import api

    options = replace(options, key=options.key or os.environ.get("OPENAI_API_KEY", ""))
    url, file = options.url, options.learn
    if file is not None:
        recorded = api.learn_canaries(
            url, file, canaries=options.canaries, model=options.model, timeout=options.timeout, key=options.key
        )
        count = len(recorded.canaries)
        report = {"schema_version": 1, "command": "watch", "ok": True, "exit_code": 0, "file": str(file)}
        text = f"wrote {file}: {count} canaries; glm5-ascend watch {url} --canaries {file}"
        output.write(report | {"canaries": count, "tokens_per_step": recorded.tokens_per_step}, [printable(text)])
        return EXIT_OK
    values = {name: getattr(options, name) for name in WatchOptions.__dataclass_fields__ if name != "_"}
    result = api.watch(WatchOptions(**values | {"on_poll": None if output.json else PollPrinter().show}))
    output.write(result.to_dict(), [printable(result.verdict)])
    return result.exit_code


class PollPrinter:
    """Prints a line for each poll with other findings than the last one."""

    def __init__(self) -> None:
        self.last: tuple[bool, frozenset[str]] | None = None

    def show(self, number: int, state: WatchState) -> None:
        current = state.reached, frozenset(state.findings)
        if current != self.last:
            findings = "; ".join(f"{name}: {text}" for name, text in state.findings.items()) or "healthy"
            print(printable(f"poll {number}: {findings if state.reached else 'no answer'}"), flush=True)
            for line in state.messages[:3] if state.findings or not state.reached else ():
                print(printable(f"  {line}"), flush=True)
        self.last = current
