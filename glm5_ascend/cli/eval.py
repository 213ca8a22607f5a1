"""`glm5-ascend eval DIR --against SRC`."""

from __future__ import annotations

import json

import typer

import glm5_ascend.cli.eval_options as options
from glm5_ascend.cli.help import command


def register(app: typer.Typer) -> None:
    command(
        app, "eval", evaluate,
        "eval glm5-w4a8 --against GLM-5 --html report.html",
        "eval glm5-w4a8 --against GLM-5 --quick",
        "eval --url http://127.0.0.1:8000 --against GLM-5 --windows 8",
    )  # fmt: skip


def evaluate(
    directory: options.Directory = None,
    against: options.Against = None,
    text: options.Text = None,
    window: options.Window = 512,
    windows: options.Windows = 64,
    quick: options.Quick = False,
    metrics: options.Metrics = None,
    lengths: options.Lengths = None,
    url: options.Url = None,
    top_logprobs: options.TopLogprobs = 20,
    prompts: options.Prompts = None,
    against_url: options.AgainstUrl = None,
    max_tokens: options.MaxTokens = 256,
    model: options.Model = "",
    key: options.Key = "",
    as_json: options.AsJson = False,
    html: options.Html = None,
    quiet: options.Quiet = False,
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
            quick=quick,
            metrics=metrics,
            lengths=lengths,
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
