"""`glm5-ascend eval DIR --against SRC`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Quantized checkpoint; left out where --url serves it.")
    ] = None,
    against: Annotated[Path | None, typer.Option(metavar="SRC", help="Its source, the reference.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Held-out text, .txt or .jsonl. Default: Python's documentation."),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="Windows, at most.")] = 64,
    metrics: Annotated[
        str | None, typer.Option(help="Only these: kl,top1,flips,nll,routing,indexer. Default: all.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running vLLM server instead of DIR, http://HOST:PORT.")] = None,
    top_logprobs: Annotated[int, typer.Option(min=1, help="With --url: log-probabilities to ask for.")] = 20,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL of prompts for --url and --against-url: lengths, score.")
    ] = None,
    against_url: Annotated[str | None, typer.Option(help="A server of the source, for --prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer to a prompt.")] = 256,
    model: Annotated[str, typer.Option(help="The servers' name for the model; by default the first they serve.")] = "",
    key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key, if the servers want one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object on stdout.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report that needs no network.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
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
