"""Options of `glm5-ascend quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.help import CALIBRATION, RUN, SHOWN
from glm5_ascend.quantize.options import Quantizer

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Directory of a GLM-5 checkpoint (bf16, fp16 or FP8).")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; appears complete or not at all.")]
Recipe = Annotated[str, typer.Option(metavar="NAME", help="Shipped recipe or a YAML file.")]
Calib = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default="bundled", help="Text, .jsonl or .txt.", rich_help_panel=CALIBRATION),
]
Samples = Annotated[int, typer.Option(min=1, max=1_000_000, help="Sequences, at most.", rich_help_panel=CALIBRATION)]
SeqLen = Annotated[int, typer.Option(min=16, max=1_048_576, help="Tokens per sequence.", rich_help_panel=CALIBRATION)]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random rotations.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint this tool wrote.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=4096, show_default="all", help="Cores to use.", rich_help_panel=RUN)
]
MaxRam = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", show_default="half of it", help="Memory to stay within, e.g. 4GiB.", rich_help_panel=RUN
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Discard an unfinished run of OUT.", rich_help_panel=RUN)]
Engine = Annotated[
    Quantizer, typer.Option(help="Who quantizes: this tool, or an installed msModelSlim.", rich_help_panel=RUN)
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="cpu; npu with msModelSlim",
        help="cpu, npu, npu:N, cuda or cuda:N.",
        rich_help_panel=RUN,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing.", rich_help_panel=RUN)
]
AsJson = Annotated[bool, typer.Option("--json", help="Result as one JSON object on stdout.", rich_help_panel=SHOWN)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the output path.", rich_help_panel=SHOWN)]
