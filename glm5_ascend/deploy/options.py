"""Options of `doctor`, `rehearse`, `accept` and the `deploy` commands, for the commands and the functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Annotated

from glm5_ascend.engine_lines import STABLE, VLLM_ASCEND_LINES
from glm5_ascend.options import Argument, ExtraArguments, Option, StrPath

LINE_NUMBERS = [line.number for line in VLLM_ASCEND_LINES]
_PROFILE = "Deploy profile; `glm5-ascend deploy list` shows them."
_ROLE = "Only this role of the profile."


@dataclass(frozen=True)
class DoctorOptions:
    directory: Annotated[StrPath | None, Argument("DIR", "Checkpoint to check as well.")] = None
    vllm_args: Annotated[Sequence[str], ExtraArguments()] = ()
    _: KW_ONLY
    profile: Annotated[str | None, Option("Deploy profile to check for known bad combinations.", "NAME")] = None
    role: Annotated[str | None, Option(_ROLE, "NAME")] = None


class RenderTarget(StrEnum):
    shell = "shell"
    compose = "compose"
    k8s = "k8s"
    kustomize = "kustomize"


@dataclass(frozen=True)
class RenderOptions:
    profile: Annotated[str, Option(_PROFILE, "NAME")]
    to: Annotated[RenderTarget | str, Option("shell, compose, k8s or kustomize.", "TARGET")]
    _: KW_ONLY
    model: Annotated[str, Option("Path of the checkpoint on the machines.", "PATH")] = "/models/glm5"
    out: Annotated[
        StrPath | None, Option("Absent or empty directory for the files.", "DIR", default_text="PROFILE-TARGET")
    ] = None
    values: Annotated[
        StrPath | None, Option("YAML with the cluster's values: key, network interface ... (k8s, kustomize).", "FILE")
    ] = None


@dataclass(frozen=True)
class RehearseOptions:
    checkpoint: Annotated[StrPath | None, Argument("[CHECKPOINT]", "Quantized checkpoint; its headers are enough.")] = (
        None
    )
    vllm_args: Annotated[Sequence[str], ExtraArguments()] = ()
    _: KW_ONLY
    profile: Annotated[str | None, Option(_PROFILE, "NAME")] = None
    role: Annotated[str | None, Option(_ROLE, "NAME")] = None
    ranks: Annotated[str, Option("all, ends (first, last, one per pipeline stage), or 0,5,15.", "RANKS")] = "ends"
    prepare: Annotated[
        StrPath | None, Option("Install vllm-ascend into DIR from PyPI (4 GB) and exit; needs no checkpoint.", "DIR")
    ] = None
    line: Annotated[str, Option(f"With --prepare: {' or '.join(LINE_NUMBERS)}.", "LINE")] = STABLE.number


@dataclass(frozen=True)
class AcceptOptions:
    directory: Annotated[StrPath, Argument("DIR", "Checkpoint to serve.")]
    _: KW_ONLY
    profile: Annotated[str, Option(_PROFILE, "NAME")]
    against: Annotated[
        StrPath | None, Option("Reference of eval, computed on this CPU.", "SRC", default_text="DIR itself")
    ] = None
    out: Annotated[StrPath | None, Option("Directory for reports and log.", "DIR", default_text="accept-PROFILE")] = (
        None
    )
    url: Annotated[str, Option("A running server; without it one is started.", "URL")] = ""
    minutes: Annotated[float, Option("Minutes of the watch.", min=0, max=1440)] = 10.0
    workload: Annotated[
        str | None,
        Option(
            "Workload of the load test: in=,out=,concurrency=,requests=.",
            "LIST",
            default_text="the planner's; small on a CPU",
        ),
    ] = None
