"""Options of `serve`, `smoke` and `watch`, for the commands and the functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from glm5_ascend.options import Argument, ExtraArguments, Option, StrPath

_SEVERAL = "For a profile of several machines: "


@dataclass(frozen=True)
class ServeOptions:
    """Options of `serve`."""

    directory: Annotated[StrPath, Argument("DIR", "Checkpoint, quantized or not.")]
    vllm_args: Annotated[Sequence[str], ExtraArguments()] = ()
    _: KW_ONLY
    host: Annotated[str | None, Option("Address to listen on.", "HOST", default_text="the profile's")] = None
    port: Annotated[int | None, Option("Port to listen on.", min=1, max=65535, default_text="the profile's")] = None
    profile: Annotated[str, Option("Deploy profile; `glm5-ascend deploy list` shows them.", "NAME")] = "cpu"
    role: Annotated[str | None, Option(_SEVERAL + "role of this machine.", "ROLE")] = None
    node: Annotated[int, Option(_SEVERAL + "number of this machine within the role.", min=0)] = 0
    rank: Annotated[int, Option(_SEVERAL + "number of the server on this machine.", min=0)] = 0
    head: Annotated[str, Option(_SEVERAL + "address of the role's node 0.", "HOST")] = ""
    ip: Annotated[str, Option(_SEVERAL + "address of this machine.", "IP")] = ""
    nic: Annotated[str, Option(_SEVERAL + "network interface of this machine.", "NAME")] = ""
    skip_verify: Annotated[bool, Option("Do not check a quantized DIR first.")] = False
    open: Annotated[bool, Option("Answer anyone: no API key on an address that others reach.")] = False
    log: Annotated[
        StrPath | None, Option("File for the server's log.", "FILE", default_text="in your directory for logs")
    ] = None
    verbose: Annotated[bool, Option("Show the server's log instead.", flags=("--verbose", "-v"))] = False
    dry_run: Annotated[bool, Option("Print environment and command, start nothing.")] = False


@dataclass(frozen=True)
class SmokeOptions:
    """Options of `glm5-ascend smoke`."""

    url: Annotated[str, Argument("URL", "Server or router, http://HOST:PORT.")]


@dataclass(frozen=True)
class WatchOptions:
    """Options of `glm5-ascend watch`."""

    url: Annotated[str, Argument("URL", "Server or router, http://HOST:PORT.")]
    _: KW_ONLY
    canaries: Annotated[
        StrPath | None,
        Option("Questions with known answers, as --learn writes.", "FILE", default_text="three sums"),
    ] = None
    once: Annotated[bool, Option("Two polls, for cron: exit code 0 healthy, 1 garbage, 3 unreachable.")] = False
    textfile: Annotated[
        StrPath | None, Option("File of metrics for Prometheus' node exporter, written after each poll.", "FILE")
    ] = None
    learn: Annotated[StrPath | None, Option("Write the answers of this healthy server to FILE, and end.", "FILE")] = (
        None
    )
