"""Options of `plan`, for the command and the function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from glm5_ascend.options import Argument, Option, StrPath

_HARDWARE = (
    "a3 (a supernode), cloudmatrix384, a3-roce, a2, a2-910b3, a2-910b4, ascend-950pr, ascend-950dt, or a YAML file "
    "that describes a machine."
)
_MODEL = "Instead of DIR: glm-5, glm-5.1 to glm-5.3, glm-5.3-flash."
_QUANT = "With --model: bf16, w8a8, w4a8, w8a8c8 or w4a8c8; on an Ascend 950 fp8 or mxfp4."
_CACHE = "Caches in INT8: none, li or li+sfa."
_WORKLOAD = (
    "Tokens in= and out= of a request; optional: concurrency= (clients), prefix_hit= (share of the prompt that is "
    "known), prefixes= (how many different ones; default: one for each client), hits= (where: device, host or pool), "
    "rate= (per second), requests= (of a whole run, with cold caches; warm=1: with warm ones)."
)
_LAYOUT = (
    "Evaluate this layout only, such as tp=16,dp=2: tp=, dp=, dcp=, pp=, replicas=, mtp=, seqs= (--max-num-seqs), "
    "tokens= (--max-num-batched-tokens), utilization=, buffer_mb=; 0 or 1: ep=, dsa_cp=, index_cache=, eager=, "
    "flashcomm=, mlapo=; of prefill engines prefill_tp=, prefill_dp=, ..., prefills= (number)."
)
_USUAL = "in=3500,out=1500,concurrency=16, or as the model takes"
_NODES = "as many as the load needs within --slo and rate="


@dataclass(frozen=True)
class PlanOptions:
    directory: Annotated[StrPath | None, Argument("DIR", "Checkpoint, for its real types and bytes.")] = None
    _: KW_ONLY
    model: Annotated[str | None, Option(_MODEL, "NAME", default_text="glm-5")] = None
    quant: Annotated[str, Option(_QUANT, "NAME")] = "w4a8"
    cache: Annotated[str | None, Option(_CACHE, "NAME", default_text="by --quant or DIR")] = None
    hardware: Annotated[str, Option(_HARDWARE, "NAME")] = "a3"
    nodes: Annotated[int | None, Option("Number of machines.", "N", 1, 4096, default_text=_NODES)] = None
    workload: Annotated[str | None, Option(_WORKLOAD, "KEY=N,...", default_text=_USUAL)] = None
    slo: Annotated[str | None, Option("Limits on latency, such as tpot=50ms,ttft=2s.", "KEY=T,...")] = None
    acceptance: Annotated[
        float | None, Option("Mean accepted length, measured with 3 drafts.", "X", default_text="3.16, healthy")
    ] = None
    layout: Annotated[str | None, Option(_LAYOUT, "KEY=N,...")] = None
    mtp: Annotated[int | None, Option("MTP draft tokens per step.", "N", 0, default_text="by source")] = None


@dataclass(frozen=True)
class PlanReportOptions(PlanOptions):
    """Options of `plan`, and the file of its report."""

    html: Annotated[StrPath | None, Option("Write a report as one HTML file without network access.", "FILE")] = None
