"""Options of `eval` and `analyze`, for the commands and the functions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from glm5_ascend.options import Argument, Option, StrPath
from glm5_ascend.quantize.options import CALIB, RECIPE, SAMPLES, SEQ_LEN, SOURCE

OUTPUT = "Output"


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of `evaluate`."""

    directory: Annotated[StrPath | None, Argument("DIR", "Quantized checkpoint; left out with --url.")] = None
    _: KW_ONLY
    against: Annotated[StrPath, Option("Source checkpoint, the reference.", "SRC")]
    text: Annotated[
        StrPath | None, Option("Held-out text, .txt or .jsonl.", "FILE", default_text="Python's documentation")
    ] = None
    window: Annotated[int, Option("Tokens per window.", min=2)] = 512
    windows: Annotated[int, Option("Windows, at most.", min=1)] = 64
    url: Annotated[str | None, Option("A running vLLM or SGLang server instead of DIR.", "URL")] = None
    html: Annotated[StrPath | None, Option("Write a report that needs no network.", "FILE", panel=OUTPUT)] = None
    card: Annotated[bool, Option("Put the figures into the model card of DIR.", panel=OUTPUT)] = False


@dataclass(frozen=True)
class AnalyzeOptions:
    """Options of `analyze`."""

    source: Annotated[StrPath, SOURCE]
    _: KW_ONLY
    recipe: Annotated[str, RECIPE] = "w4a8"
    budget: Annotated[
        int | str | None,
        Option(
            "Size limit of the output, such as 420GB: proposes what to keep in more bits.",
            "SIZE",
            default_text="the recipe's rules",
        ),
    ] = None
    out: Annotated[StrPath | None, Option("Write the proposal as a recipe.", "FILE")] = None
    calib: Annotated[StrPath | None, CALIB] = None
    samples: Annotated[int, SAMPLES] = 32
    seq_len: Annotated[int, SEQ_LEN] = 512
