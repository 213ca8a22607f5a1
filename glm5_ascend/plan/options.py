"""Options of `plan`, for the command and the function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from glm5_ascend.options import Argument, Option, StrPath

_MODEL, _MACHINES, _LOAD, _ENGINE = "Model", "Machines", "Load and limits", "Engine"
_OUTPUT, _MEASURE = "Output", "Measurements"


@dataclass(frozen=True)
class PlanOptions:
    """Options of `plan`."""

    directory: Annotated[StrPath | None, Argument("DIR", "Checkpoint, for its real types and bytes.")] = None
    _: KW_ONLY
    model: Annotated[
        str | None,
        Option("Instead of DIR: glm-5, glm-5.1, glm-5.2 or glm-5.3.", "NAME", default_text="glm-5", panel=_MODEL),
    ] = None
    quant: Annotated[
        str,
        Option(
            "With --model: bf16, w8a8, w4a8, w8a8c8 or w4a8c8; on an Ascend 950 fp8 or mxfp4.", "NAME", panel=_MODEL
        ),
    ] = "w4a8"
    cache: Annotated[
        str | None,
        Option("Caches in INT8: none, li or li+sfa.", "NAME", default_text="by --quant or DIR", panel=_MODEL),
    ] = None
    hardware: Annotated[
        str,
        Option(
            "a3 (a supernode), cloudmatrix384, a3-roce, a2, a2-910b3, a2-910b4, ascend-950pr, cpu (after --measure), "
            "or a YAML file that describes a machine.",
            "NAME",
            panel=_MACHINES,
        ),
    ] = "a3"
    nodes: Annotated[int, Option("Number of machines.", "N", panel=_MACHINES)] = 1
    price: Annotated[
        float | None,
        Option(
            "Price of one machine and hour; adds the cost of a token.",
            "X",
            default_text="by --hardware",
            panel=_MACHINES,
        ),
    ] = None
    workload: Annotated[
        str,
        Option(
            "Tokens in= and out= of a request; optional: concurrency= (clients), prefix_hit= (share of the prompt), "
            "rate= (per second), requests= (of the whole run).",
            "KEY=N,...",
            panel=_LOAD,
        ),
    ] = "in=3500,out=1500,concurrency=16"
    slo: Annotated[str | None, Option("Limits on latency, such as tpot=50ms,ttft=2s.", "KEY=T,...", panel=_LOAD)] = None
    acceptance: Annotated[
        str | float | None,
        Option(
            "Mean accepted length measured with 3 drafts, or the share of each position, such as 0.90,0.77,0.63 or "
            "0.86-0.90,0.63-0.77,0.42-0.63, whose ranges widen the band.",
            "X",
            default_text="3.16, healthy",
            panel=_LOAD,
        ),
    ] = None
    layout: Annotated[
        str | None,
        Option(
            "Evaluate this layout only: tp=; optional: dp=, dcp=, pp=, replicas=, seqs= (--max-num-seqs), prefill_tp= "
            "with prefill_dp=, prefill_pp=, prefills= (engines), redundant= (experts), dsa_cp= and ep= (0 or 1); such "
            "as tp=16,dp=2.",
            "KEY=N,...",
            panel=_ENGINE,
        ),
    ] = None
    mtp: Annotated[int | None, Option("MTP draft tokens per step.", "N", default_text="searched", panel=_ENGINE)] = None
    tails: Annotated[
        bool, Option("Also simulate the scheduler, for percentiles of latency; takes seconds.", panel=_OUTPUT)
    ] = False
    html: Annotated[
        StrPath | None, Option("Write a report as one HTML file without network access.", "FILE", panel=_OUTPUT)
    ] = None


@dataclass(frozen=True)
class PlanCommandOptions(PlanOptions):
    """Options of the command `plan`, which also measures, calibrates and prints a load sweep."""

    sweep: Annotated[
        bool, Option("Also a table with 1/16 to 4 times the clients: goodput within --slo.", panel=_OUTPUT)
    ] = False
    measure: Annotated[
        bool,
        Option("Instead: describe this CPU for --hardware cpu; serves DIR, or the demo model, here.", panel=_MEASURE),
    ] = False
    calibrate: Annotated[
        StrPath | None,
        Option(
            "Instead: fit to your runs: a CSV, or the JSON of vllm bench serve or AISBench with --model, --quant and "
            "--layout; --out writes the machine.",
            "FILE",
            panel=_MEASURE,
        ),
    ] = None
    out: Annotated[
        StrPath | None, Option("With --measure or --calibrate: write the machine to FILE.", "FILE", panel=_MEASURE)
    ] = None
