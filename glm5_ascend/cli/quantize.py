"""`glm5-ascend quantize SRC OUT`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from glm5_ascend.errors import OutputError, StoppedError

if TYPE_CHECKING:
    from glm5_ascend.quantize.pipeline import Prepared, Result


class Engine(StrEnum):
    """Who quantizes."""

    own = "own"
    msmodelslim = "msmodelslim"


def register(app: typer.Typer) -> None:
    app.command("quantize")(quantize)


def quantize(
    source: Annotated[
        Path | None, typer.Argument(metavar="SRC", help="Directory of a GLM-5 checkpoint (bf16, fp16 or FP8).")
    ] = None,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Directory to write; appears complete or not at all.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Shipped recipe or a YAML file. Default: w4a8.")] = None,
    calib: Annotated[Path | None, typer.Option(help="Calibration text, .jsonl or .txt. Default: bundled.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration sequences, at most.")] = 64,
    seq_len: Annotated[int, typer.Option(min=16, help="Tokens per calibration sequence.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random rotations.")] = 1234,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint this tool wrote.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to use. Default: all.")] = None,
    max_ram: Annotated[str | None, typer.Option(help="Memory to stay within, e.g. 4GiB. Default: half.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an unfinished run of OUT.")] = False,
    engine: Annotated[Engine, typer.Option(help="Who quantizes: this tool, or an installed msModelSlim.")] = Engine.own,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where to compute: cpu, npu or npu:N. Default: cpu; with --engine msmodelslim npu (or npu:0,1)."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Result as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the output path.")] = False,
    model_path: Annotated[Path | None, typer.Option("--model_path", help="SRC, as msModelSlim spells it.")] = None,
    save_path: Annotated[Path | None, typer.Option("--save_path", help="OUT, as msModelSlim spells it.")] = None,
    quant_type: Annotated[str | None, typer.Option("--quant_type", help="--recipe, as msModelSlim spells it.")] = None,
) -> int:
    """Quantize GLM-5 to the format vllm-ascend loads (msModelSlim's). A stopped run goes on with the same command."""
    from glm5_ascend.cli.progress import ConsoleProgress, show_plan, show_prediction, show_result
    from glm5_ascend.quantize import pipeline
    from glm5_ascend.quantize.options import QuantizeOptions

    source = _either("SRC", source, "--model_path", model_path)
    out = _either("OUT", out, "--save_path", save_path)
    recipe = _either("--recipe", recipe, "--quant_type", quant_type, "w4a8")
    command = shlex.join(["glm5-ascend", *sys.argv[1:]])
    quiet = quiet or os.environ.get("RANK", "0") != "0"  # the helping ranks of a torchrun
    options = QuantizeOptions(
        source, out, recipe, calib, samples, seq_len, seed, overwrite, command, threads, parse_size(max_ram), restart,
        device or "cpu" if engine is Engine.own else "cpu",
    )  # fmt: skip
    job = pipeline.prepare(options)
    if not quiet:
        show_plan(job)
    if dry_run:
        prediction = pipeline.predict(job)
        if not quiet:
            show_prediction(prediction)
        problem = None
        try:
            pipeline.check_space(job)  # last: the numbers are wanted most where the disk is too small
        except OutputError as error:
            if not as_json:
                raise
            problem = error
        if as_json:
            print(json.dumps(_plan_json(job, problem) | {"prediction": asdict(prediction)}))
        return problem.exit_code if problem else 0
    if engine is Engine.msmodelslim:
        pipeline.check_space(job)
        return _with_msmodelslim(job, device or "npu")
    with ConsoleProgress(quiet) as progress:
        try:
            result = pipeline.quantize(job, progress)
        except KeyboardInterrupt:
            raise StoppedError(f"{out} is not finished", "the same command goes on where this one stopped") from None
    if result is None:
        return 0
    if as_json:
        print(json.dumps(_result_json(job, result)))
    elif quiet:
        print(result.out)
    if not quiet:
        show_result(result)
    return 0


def _with_msmodelslim(job: Prepared, device: str) -> int:
    """The official tool writes, our verifier judges: its exit code is the command's."""
    from glm5_ascend.cli.verify import verify
    from glm5_ascend.quantize.msmodelslim import run_msmodelslim
    from glm5_ascend.quantize.pipeline import calibration_of

    o = job.options
    run_msmodelslim(o.source, o.out, job.recipe, job.source.config, calibration_of(job), device)
    return verify(o.out, against=o.source)


Value = TypeVar("Value", Path, str)


def _either(name: str, value: Value | None, alias: str, other: Value | None, default: Value | None = None) -> Value:
    """The value given under one of two spellings."""
    if value is not None and other is not None:
        raise typer.BadParameter(f"given twice: as {name} and as {alias}", param_hint=name)
    chosen = value if value is not None else other if other is not None else default
    if chosen is None:
        raise typer.BadParameter(f"missing: give {name} (or {alias})", param_hint=name)
    return chosen


def parse_size(text: str | None, option: str = "--max-ram") -> int | None:
    """Bytes behind "4GiB", "500MB" or a plain number."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not found:
        raise typer.BadParameter(f"{text!r} is not a size such as 4GiB", param_hint=option)
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def _plan_json(job: Prepared, error: OutputError | None = None) -> dict[str, Any]:
    rows = [
        {"modules": kind, "type": scheme, "count": count, "bytes": nbytes}
        for kind, scheme, count, nbytes in job.plan.summary()
    ]
    return {
        "schema_version": 1, "command": "quantize", "ok": error is None, "exit_code": error.exit_code if error else 0,
        **({"error": {"message": error.message, "fix": error.tip}} if error else {}), "dry_run": True,
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
            {"layer": r.layer, "cold_experts": r.cold_experts, "relative_weight_error": r.errors.relative()}
            for r in result.reports
        ],
    }
