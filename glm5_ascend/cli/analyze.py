"""`glm5-ascend analyze SRC`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.help import CALIBRATION, SHOWN, command


def register(app: typer.Typer) -> None:
    command(
        app, "analyze", analyze,
        "analyze GLM-5 --html report.html",
        "analyze GLM-5 --budget 420GB --out my-recipe.yaml",
        "analyze GLM-5.2 --recipe glm-5.2-w4a8 --seq-len 4096 --out r.yaml",
    )  # fmt: skip


def analyze(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory of a GLM-5 checkpoint (bf16, fp16 or FP8).")],
    recipe: Annotated[str, typer.Option(metavar="NAME", help="Shipped recipe or a YAML file.")] = "w4a8",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size the output may have, e.g. 420GB: proposes what to keep in more bits; else the recipe's rules.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the proposal as a recipe, for --budget or by the recipe's rules."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report that needs no network.", rich_help_panel=SHOWN)
    ] = None,
    calib: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default="bundled", help="Text, .jsonl or .txt.", rich_help_panel=CALIBRATION),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Sequences, at most.", rich_help_panel=CALIBRATION)
    ] = 32,
    seq_len: Annotated[
        int, typer.Option(min=16, max=1_048_576, help="Tokens per sequence.", rich_help_panel=CALIBRATION)
    ] = 512,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random rotations.")] = 1234,
    threads: Annotated[int | None, typer.Option(min=1, max=4096, show_default="all", help="Cores to use.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Report as one JSON object on stdout.", rich_help_panel=SHOWN)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=SHOWN)] = False,
) -> int:
    """Where a recipe loses accuracy, by layer, module and expert; what to keep in more bits under a budget."""
    from glm5_ascend.cli.progress import ProgressBar, console
    from glm5_ascend.fidelity.api import analyze as run

    with ProgressBar(quiet) as progress:
        report = run(
            source,
            recipe=recipe,
            budget=budget,
            out=out,
            html=html,
            calib=calib,
            samples=samples,
            seq_len=seq_len,
            seed=seed,
            threads=threads,
            progress=progress,
        )
    for note in report.analysis.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        for line in report.lines():
            print(line)
    return 0
