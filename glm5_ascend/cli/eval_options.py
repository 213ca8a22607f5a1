"""Options of `glm5-ascend eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.help import SERVERS, SHOWN

Directory = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="Quantized checkpoint; left out where --url serves it.")
]
Against = Annotated[Path | None, typer.Option(metavar="SRC", help="Its source, the reference.")]
Text = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default="Python's documentation", help="Held-out text, .txt or .jsonl."),
]
Window = Annotated[int, typer.Option(min=2, help="Tokens per window.")]
Windows = Annotated[int, typer.Option(min=1, help="Windows, at most.")]
Quick = Annotated[bool, typer.Option("--quick", help="20 windows of 128 tokens: a thirteenth of the tokens.")]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", show_default="all", help="Only these, with commas: kl, top1, flips, nll, routing, indexer, mtp."
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        show_default="none",
        help="Prompts of so many tokens that repeat what stands in them: are the keys kept? Such as 4096,16384.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="A running vLLM or SGLang server instead of DIR.", rich_help_panel=SERVERS),
]
TopLogprobs = Annotated[
    int, typer.Option(min=1, help="With --url: log-probabilities to ask for.", rich_help_panel=SERVERS)
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSONL of prompts for --url and --against-url: lengths, score.",
        rich_help_panel=SERVERS,
    ),
]
AgainstUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="A server of the source, for --prompts.", rich_help_panel=SERVERS)
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.", rich_help_panel=SERVERS)]
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        show_default="the first they serve",
        help="The servers' name for the model.",
        rich_help_panel=SERVERS,
    ),
]
Key = Annotated[
    str,
    typer.Option(
        metavar="KEY", envvar="OPENAI_API_KEY", help="API key, if the servers want one.", rich_help_panel=SERVERS
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Report as one JSON object on stdout.", rich_help_panel=SHOWN)]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a report that needs no network.", rich_help_panel=SHOWN)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=SHOWN)]
