"""`glm5-ascend eval DIR --against SRC`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.help import SERVERS, SHOWN, command


def register(app: typer.Typer) -> None:
    command(
        app, "eval", evaluate,
        "eval glm5-w4a8 --against GLM-5 --html report.html",
        "eval --url http://127.0.0.1:8000 --against GLM-5 --windows 8",
    )  # fmt: skip


def evaluate(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Quantized checkpoint; left out where --url serves it.")
    ] = None,
    against: Annotated[Path | None, typer.Option(metavar="SRC", help="Its source, the reference.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default="Python's documentation", help="Held-out text, .txt or .jsonl."),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="Windows, at most.")] = 64,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", show_default="all", help="Only these, with commas: kl, top1, flips, nll, routing, indexer."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running vLLM server instead of DIR.", rich_help_panel=SERVERS)
    ] = None,
    top_logprobs: Annotated[
        int, typer.Option(min=1, help="With --url: log-probabilities to ask for.", rich_help_panel=SERVERS)
    ] = 20,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSONL of prompts for --url and --against-url: lengths, score.",
            rich_help_panel=SERVERS,
        ),
    ] = None,
    against_url: Annotated[
        str | None, typer.Option(metavar="URL", help="A server of the source, for --prompts.", rich_help_panel=SERVERS)
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer, at most.", rich_help_panel=SERVERS)
    ] = 256,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            show_default="the first they serve",
            help="The servers' name for the model.",
            rich_help_panel=SERVERS,
        ),
    ] = "",
    key: Annotated[
        str,
        typer.Option(
            metavar="KEY", envvar="OPENAI_API_KEY", help="API key, if the servers want one.", rich_help_panel=SERVERS
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Report as one JSON object on stdout.", rich_help_panel=SHOWN)
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report that needs no network.", rich_help_panel=SHOWN)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=SHOWN)] = False,
) -> int:
    """What a quantization costs: KL, top-1, flips, NLL, routing and answers against the source, with intervals."""
    from glm5_ascend.cli.progress import ProgressBar
    from glm5_ascend.fidelity.api import evaluate as run

    with ProgressBar(quiet) as progress:
        found = run(
            directory,
            against=against,
            text=text,
            window=window,
            windows=windows,
            metrics=metrics,
            url=url,
            top_logprobs=top_logprobs,
            prompts=prompts,
            against_url=against_url,
            max_tokens=max_tokens,
            model=model,
            key=key,
            html=html,
            progress=progress,
        )
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        for line in found.lines():
            print(line)
    return 0
