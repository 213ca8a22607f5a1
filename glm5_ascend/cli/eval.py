"""`glm5-ascend eval DIR --against SRC`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5_ascend.errors import EvaluationError

if TYPE_CHECKING:
    from glm5_ascend.fidelity.evaluation.compare import Comparison
    from glm5_ascend.serve.client import Client


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
    from glm5_ascend.cli.steps import LayerProgress
    from glm5_ascend.demo_model.corpus import validation_texts
    from glm5_ascend.fidelity.evaluation.compare import compare
    from glm5_ascend.fidelity.evaluation.generation import generate, generation_metrics, read_prompts
    from glm5_ascend.fidelity.evaluation.metrics import chosen_groups
    from glm5_ascend.fidelity.evaluation.metrics import metrics as figures
    from glm5_ascend.fidelity.evaluation.served import compare_served
    from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
    from glm5_ascend.fidelity.evaluation.summary import Summary
    from glm5_ascend.fidelity.evaluation.windows import read_windows
    from glm5_ascend.report import page

    groups = chosen_groups(metrics)
    _check_arguments(directory, against, url, prompts, against_url)
    if html is not None:
        page.check_place(html)
    asked = read_prompts(prompts) if prompts is not None else []
    servers = [_client(address, model, key) for address in (url, against_url) if address is not None]
    summary = Summary(url or str(directory), str(against or against_url))
    if against is not None:
        config = StoredModel(against).config
        read = read_windows(text, validation_texts() if text is None else (), against, config, window, windows)
        found: Comparison
        with LayerProgress(quiet) as progress:
            if directory is not None:
                found = compare(directory, against, read, progress)
            else:
                found = compare_served(servers[0], against, read, top_logprobs, progress)
        summary.rows = [row for row in figures(found) if row.group in groups]
        summary.layers = [
            replace(
                layer,
                experts=layer.experts if "routing" in groups else None,
                indexer=layer.indexer if "indexer" in groups else None,
            )
            for layer in found.layers
        ]
        summary.window, summary.windows, summary.kl_is_bound = window, len(read), found.kl_is_bound
        summary.per_window = found.kl.mean(1) if "kl" in groups else None
    if asked:
        this, reference = (generate(server, asked, max_tokens) for server in servers)
        summary.prompts, summary.generated = len(asked), generation_metrics(asked, reference, this)
    if html is not None:
        page.write(html, summary.html())
    if as_json:
        print(json.dumps(summary.to_json()))
    else:
        for line in summary.lines():
            print(line)
    return 0


def _check_arguments(
    directory: Path | None, against: Path | None, url: str | None, prompts: Path | None, against_url: str | None
) -> None:
    if (directory is None) == (url is None):
        raise EvaluationError("give either DIR or --url", "DIR is computed here, --url is asked")
    if (prompts is None) != (against_url is None) or (prompts is not None and url is None):
        raise EvaluationError(
            "--prompts, --url and --against-url go together: two running servers answer the prompts",
            "start both with glm5-ascend serve",
        )
    if against is None and prompts is None:
        raise EvaluationError("nothing to compare with", "give the source checkpoint with --against SRC")


def _client(address: str, model: str, key: str) -> Client:
    from glm5_ascend.serve.client import Client, server_address

    client = Client(server_address(address), model, 600.0, key)
    return replace(client, model=client.entry()["id"])
