"""`glm5-ascend analyze SRC`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.quantize import parse_size


def register(app: typer.Typer) -> None:
    app.command("analyze")(analyze)


def analyze(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory of a GLM-5 checkpoint (bf16, fp16 or FP8).")],
    recipe: Annotated[str, typer.Option(help="Shipped recipe or a YAML file.")] = "w4a8",
    budget: Annotated[
        str | None, typer.Option(help="Size the output may have, e.g. 420GB: proposes what to keep in more bits.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RECIPE.yaml", help="With --budget: write the proposal as a recipe.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report that needs no network.")] = None,
    calib: Annotated[Path | None, typer.Option(help="Calibration text, .jsonl or .txt. Default: bundled.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration sequences, at most.")] = 32,
    seq_len: Annotated[int, typer.Option(min=16, help="Tokens per calibration sequence.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random rotations.")] = 1234,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to use. Default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> int:
    """Where a recipe loses accuracy, by layer, module and expert; what to keep in more bits under a budget."""
    from glm5_ascend.cli.steps import LayerProgress
    from glm5_ascend.fidelity.analysis import recipe as recipes
    from glm5_ascend.fidelity.analysis import run, summary
    from glm5_ascend.fidelity.analysis.budget import final_types, propose
    from glm5_ascend.fidelity.analysis.html import document
    from glm5_ascend.report import page

    limit = parse_size(budget, "--budget")
    if out is not None:
        if limit is None:
            raise typer.BadParameter("a recipe is written for a budget: give --budget as well", param_hint="--out")
        recipes.check_place(out)
    if html is not None:
        page.check_place(html)
    job = run.prepare(run.Options(source, recipe, calib, samples, seq_len, seed, threads))
    if limit is not None:
        propose([], job.plan.output_bytes, limit)  # a budget that is too small is said before the work
    with LayerProgress(quiet) as progress:
        found = run.analyze(job, progress)
    predicted, steps = found.plan.output_bytes, []
    if limit is not None:
        steps = propose((unit for layer in found.layers for unit in layer.units), predicted, limit)
        value = recipes.with_fallbacks(found.recipe_path, found.plan.config, final_types(steps))
        predicted = recipes.output_bytes(found.plan.source, value)
        if out is not None:
            removed, total = summary.removed_noise(found, steps)
            comment = [
                f"{recipe} with fall-backs, by glm5-ascend analyze: {predicted} bytes within a budget of {limit}.",
                f"Measured on {found.tokens} calibration tokens: {removed / total:.1%} of the noise that rounding adds "
                "to the",
                "residual streams goes. Assumed: units add up, and noise costs the same in every layer.",
            ]
            recipes.write(out, value, comment)
    if html is not None:
        page.write(html, document(found, steps, predicted))
    if as_json:
        print(json.dumps(summary.to_json(found, steps, predicted)))
    else:
        for line in summary.lines(found, steps, predicted):
            print(line)
    return 0
