"""`quantize()`: what the command `glm5-ascend quantize` calls."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.errors import Glm5Error, OutputError, StoppedError
from glm5_ascend.quantize.estimate.memory import RunPrediction
from glm5_ascend.quantize.msmodelslim import run_msmodelslim
from glm5_ascend.quantize.options import QuantizeOptions, Quantizer
from glm5_ascend.quantize.pipeline import (
    PreparedJob,
    calibration_of,
    check_space,
    predict,
    prepare,
)
from glm5_ascend.quantize.pipeline import quantize as run
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.quantize.result import QuantizeResult
from glm5_ascend.quantize.sizes import parse_size


@dataclass
class QuantizeReport:
    """What was planned and what came of it.

    Attributes:
        recipe: its id. output_bytes: of all tensors.
        plan: rows (kind of module, type, number of modules, bytes).
        prediction: of a dry run.
        result: of a run by this package; None for a dry run and for msModelSlim.
        out: the finished checkpoint; None for a dry run.
        kept: what msModelSlim's result found in its place and was not ours to remove, under its new name.
        problem: why the run would fail; only a dry run returns it instead of raising it.
    """

    recipe: str
    output_bytes: int
    plan: list[tuple[str, str, int, int]] = field(default_factory=list)
    out: Path | None = None
    prediction: RunPrediction | None = None
    result: QuantizeResult | None = None
    kept: Path | None = None
    problem: Glm5Error | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints, without its frame."""
        rows = [{"modules": kind, "type": scheme, "count": n, "bytes": nbytes} for kind, scheme, n, nbytes in self.plan]
        value: dict[str, Any] = {
            "dry_run": self.out is None, "recipe": self.recipe, "output_bytes": self.output_bytes, "plan": rows,
        }  # fmt: skip
        if self.prediction is not None:
            value["prediction"] = asdict(self.prediction)
        if self.out is not None:
            value |= {"out": str(self.out), "kept": None if self.kept is None else str(self.kept)}
        if self.result is not None:
            value |= self.result.to_dict()
        return value


def quantize(
    source: str | Path,
    out: str | Path,
    *,
    recipe: str = "w4a8",
    calib: str | Path | None = None,
    samples: int = 64,
    seq_len: int = 512,
    seed: int = 1234,
    overwrite: bool = False,
    threads: int | None = None,
    max_ram: int | str | None = None,
    restart: bool = False,
    engine: str = Quantizer.own,
    device: str | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
    on_plan: Callable[[PreparedJob], None] | None = None,
) -> QuantizeReport | None:
    """Quantize the checkpoint `source` into the new directory `out`; a stopped run goes on with the same call.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        calib: calibration text, .jsonl or .txt; None takes the recipe's.
        samples, seq_len: at most so many sequences of so many tokens.
        seed: of the random rotations.
        overwrite: replace a checkpoint that this package wrote.
        threads: None for all cores; the result does not depend on it.
        max_ram: bytes, or text such as "4GiB", to stay within; None for half of the machine's memory.
        restart: discard an unfinished run of `out`.
        engine: "own" or "msmodelslim".
        device: "cpu", "npu", "npu:N", "cuda" or "cuda:N"; None is cpu, with msModelSlim npu.
        dry_run: check everything and predict; nothing is written.
        progress: progress(text, done, total) in layers, see `glm5_ascend.quantize.progress`.
        on_plan: gets the checked job before the work begins.
    Returns:
        the report; None in the helping ranks of a torchrun.
    Raises:
        Glm5Error: what is wrong and what to do, before anything is written. StoppedError: Ctrl-C or SIGTERM; what was
            done is kept.
    """
    own = Quantizer(engine) is Quantizer.own
    options = QuantizeOptions(
        source=Path(source),
        out=Path(out),
        recipe=str(recipe),
        calib=None if calib is None else Path(calib),
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        overwrite=overwrite,
        command=_command(),
        threads=threads,
        max_ram=parse_size(max_ram, "--max-ram"),
        restart=restart,
        device=("cpu" if device is None else device) if own else "cpu",
    )
    prepared = prepare(options, progress)
    if on_plan is not None:
        on_plan(prepared)
    if dry_run:
        return _predicted(prepared)
    if own:
        return _quantized(prepared, progress)
    check_space(prepared)
    report = _report(prepared, options.out)
    report.kept = run_msmodelslim(prepared, calibration_of(prepared), device or "npu")
    return report


def _report(prepared: PreparedJob, out: Path | None) -> QuantizeReport:
    return QuantizeReport(prepared.recipe.metadata.config_id, prepared.output_bytes, prepared.plan.summary(), out)


def _predicted(prepared: PreparedJob) -> QuantizeReport:
    report = _report(prepared, None)
    report.prediction = predict(prepared)
    try:
        check_space(prepared)  # last: the numbers are wanted most where the disk is too small
    except OutputError as error:
        report.problem = error
    return report


def _quantized(prepared: PreparedJob, progress: Progress) -> QuantizeReport | None:
    report = _report(prepared, prepared.options.out)
    try:
        report.result = run(prepared, progress)
    except KeyboardInterrupt:
        out = prepared.options.out
        raise StoppedError(f"{out} is not finished", "the same command goes on where this one stopped") from None
    return None if report.result is None else report


def is_helper() -> bool:
    """Whether this is a helping rank of a torchrun, which reports nothing."""
    return os.environ.get("RANK", "0") != "0"


def _command() -> str:
    """The command line for the provenance; of another program its name."""
    called = Path(sys.argv[0]).name if sys.argv else ""
    if called in ("glm5-ascend", "__main__.py", "-m"):
        return shlex.join(["glm5-ascend", *sys.argv[1:]])
    return "glm5_ascend.quantize.quantize"
