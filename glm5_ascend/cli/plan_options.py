"""Options of `glm5-ascend plan`, by what they are about."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class CacheOption(StrEnum):
    """Which caches are INT8 at run time."""

    none = "none"
    li = "li"
    li_sfa = "li+sfa"


def _option(panel: str, text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, **more)


_MODEL, _MACHINES, _LOAD, _ENGINE = "Model", "Machines", "Load and limits", "Engine"
_ANSWER, _MEASURE = "Answer", "Measure this CPU"

Directory = Annotated[Path | None, typer.Argument(metavar="DIR", help="A checkpoint: its real types and bytes.")]
ModelName = Annotated[
    str | None, _option(_MODEL, "Instead of DIR: glm-5, glm-5.1, glm-5.2 or glm-5.3.", metavar="NAME")
]
Quant = Annotated[
    str,
    _option(_MODEL, "With --model: bf16, w8a8, w4a8, w8a8c8 or w4a8c8; on an Ascend 950 fp8 or mxfp4.", metavar="NAME"),
]
Cache = Annotated[CacheOption | None, _option(_MODEL, "Caches in INT8.", show_default="by --quant or DIR")]
IndexCache = Annotated[bool, _option(_MODEL, "Run-time reuse of the indexer's choice.", "--index-cache")]

HardwareName = Annotated[
    str,
    _option(
        _MACHINES,
        "a3 (a supernode), cloudmatrix384, a3-roce, a2, a2-910b3, a2-910b4, ascend-950pr, cpu (after --measure), or "
        "a YAML file that describes one.",
        metavar="NAME",
    ),
]
Nodes = Annotated[int, _option(_MACHINES, "How many machines.", metavar="N")]
Price = Annotated[float | None, _option(_MACHINES, "Of one machine and hour: adds the cost of a token.", metavar="X")]

Power = Annotated[
    float | None,
    _option(
        _MACHINES, "Of one machine under load: adds energy.", "--power-usage", metavar="W", show_default="by --hardware"
    ),
]

Workload = Annotated[
    str,
    _option(
        _LOAD,
        "Tokens in= and out= of a request, and if wanted: concurrency= (clients), prefix_hit= (share of the prompt), "
        "rate= (per second), requests= (of the whole run).",
        metavar="KEY=N,...",
    ),
]
Slo = Annotated[str | None, _option(_LOAD, "Limits on latency, as in tpot=50ms,ttft=2s.", metavar="KEY=T,...")]
Acceptance = Annotated[
    str | None,
    _option(
        _LOAD,
        "Mean accepted length measured with 3 drafts, or the share of each position, as in 0.90,0.77,0.63 or "
        "0.86-0.90,0.63-0.77,0.42-0.63, whose ranges widen the band.",
        metavar="X",
        show_default="3.16, healthy",
    ),
]

Imbalance = Annotated[
    float,
    _option(_LOAD, "Load of the die with the hottest experts over the mean, beyond what chance does.", metavar="X"),
]

HostTime = Annotated[
    float,
    _option(
        _MACHINES, "Time the host's processor takes to launch operators, over that of the public results' hosts.",
        metavar="X",
    ),
]  # fmt: skip

LayoutText = Annotated[
    str | None,
    _option(
        _ENGINE,
        "Judge this one instead of searching: tp= and, if wanted, dp=, dcp=, pp=, replicas=, prefill_tp= with "
        "prefill_dp=, prefill_pp=, prefills= (engines), redundant= (experts), dsa_cp= and ep= (0 or 1); as in "
        "tp=16,dp=2.",
        metavar="KEY=N,...",
    ),
]
Drafts = Annotated[
    int | None, _option(_ENGINE, "MTP tokens per step.", metavar="N", show_default="the best is searched")
]
Sequences = Annotated[
    int | None, _option(_ENGINE, "vLLM's --max-num-seqs, of a rank.", metavar="N", show_default="as many as needed")
]
BatchedTokens = Annotated[int, _option(_ENGINE, "vLLM's --max-num-batched-tokens.", metavar="N")]
Utilization = Annotated[float, _option(_ENGINE, "vLLM's --gpu-memory-utilization.", metavar="SHARE")]
BufferMb = Annotated[int, _option(_ENGINE, "HCCL_BUFFSIZE in MB.", metavar="MB")]

Tails = Annotated[
    bool, _option(_ANSWER, "Also simulate the scheduler: percentiles of latency, in a few seconds.", "--tails")
]
Html = Annotated[Path | None, _option(_ANSWER, "Write a report that needs no network.", metavar="FILE")]
AsJson = Annotated[bool, _option(_ANSWER, "One JSON object on stdout.", "--json")]

Sweep = Annotated[
    bool, _option(_ANSWER, "Also the layout at a sixteenth to four times the load: goodput within --slo.", "--sweep")
]
WhatIf = Annotated[
    bool, _option(_ANSWER, "Instead: half and twice the nodes and the context, other weights.", "--what-if")
]
CsvFile = Annotated[
    Path | None, _option(_ANSWER, "With --sweep or --what-if: write the table.", "--csv", metavar="FILE")
]
Baselines = Annotated[
    bool, _option(_ANSWER, "List every public result the planner knows, and how far off it is.", "--baselines")
]

Measure = Annotated[
    bool,
    _option(
        _MEASURE, "Describe this machine's CPU for --hardware cpu: serves DIR, or the demo model, here.", "--measure"
    ),
]
Calibrate = Annotated[
    Path | None,
    _option(
        _MEASURE,
        "Fit to your own runs: a CSV, or the JSON of vllm bench serve or AISBench with --model, --quant and --layout; "
        "--out writes the machine.",
        metavar="FILE",
    ),
]
Out = Annotated[
    Path | None, _option(_MEASURE, "With --measure or --calibrate: write the machine there.", metavar="FILE")
]
