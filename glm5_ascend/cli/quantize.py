"""`glm5-ascend quantize SRC OUT`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from glm5_ascend.quantize.pipeline import Prepared, Result


def register(app: typer.Typer) -> None:
    app.command("quantize")(quantize)


def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory of a GLM-5 checkpoint (bf16, fp16 or FP8).")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; appears complete or not at all.")],
    recipe: Annotated[str, typer.Option(help="Shipped recipe (w4a8, w8a8, ...) or a YAML file.")] = "w4a8",
    calib: Annotated[Path | None, typer.Option(help="Calibration text, .jsonl or .txt. Default: bundled.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration sequences, at most.")] = 64,
    seq_len: Annotated[int, typer.Option(min=16, help="Tokens per calibration sequence.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random rotations.")] = 1234,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint this tool wrote.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Result as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the output path.")] = False,
) -> int:
    """Quantize GLM-5 to the format vllm-ascend loads (msModelSlim's)."""
    from glm5_ascend.cli.progress import ConsoleProgress, show_plan, show_result
    from glm5_ascend.quantize import pipeline
    from glm5_ascend.quantize.options import QuantizeOptions

    command = shlex.join(["glm5-ascend", *sys.argv[1:]])
    options = QuantizeOptions(source, out, recipe, calib, samples, seq_len, seed, overwrite, command)
    job = pipeline.prepare(options)
    if not quiet:
        show_plan(job)
    if dry_run:
        if as_json:
            print(json.dumps(_plan_json(job)))
        return 0
    result = pipeline.quantize(job, ConsoleProgress(quiet))
    if as_json:
        print(json.dumps(_result_json(job, result)))
    elif quiet:
        print(result.out)
    if not quiet:
        show_result(result)
    return 0


def _plan_json(job: Prepared) -> dict[str, Any]:
    rows = [
        {"modules": kind, "type": scheme, "count": count, "bytes": nbytes}
        for kind, scheme, count, nbytes in job.plan.summary()
    ]
    return {
        "schema_version": 1, "command": "quantize", "ok": True, "exit_code": 0, "dry_run": True,
        "recipe": job.recipe.metadata.config_id, "output_bytes": job.output_bytes, "plan": rows,
    }  # fmt: skip


def _result_json(job: Prepared, result: Result) -> dict[str, Any]:
    return _plan_json(job) | {
        "dry_run": False,
        "out": str(result.out),
        "seconds": round(result.seconds, 2),
        "peak_rss_bytes": result.peak_rss_bytes,
        "source_bytes": result.source_bytes,
        "calibration_tokens": result.calibration_tokens,
        "layers": [
            {"layer": r.layer, "cold_experts": r.cold_experts, "relative_weight_error": r.relative_errors()}
            for r in result.reports
        ],
    }
