"""Options of `serve`, `smoke` and `watch`, for the commands and the functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

from glm5_ascend.options import Argument, ExtraArguments, Option, StrPath

_WITH_PROFILE = "For --profile with several machines: "


@dataclass(frozen=True)
class ServeOptions:
    """Options of `glm5-ascend serve`."""

    directory: Annotated[StrPath, Argument("DIR", "Checkpoint, quantized or not.")]
    vllm_args: Annotated[Sequence[str], ExtraArguments()] = ()
    _: KW_ONLY
    host: Annotated[str | None, Option("Address to listen on.", "HOST", default_text="127.0.0.1, or the profile's")] = (
        None
    )
    port: Annotated[
        int | None, Option("Port to listen on.", min=1, max=65535, default_text="8000, or the profile's")
    ] = None
    profile: Annotated[str | None, Option("Deploy profile; `glm5-ascend deploy list` shows them.", "NAME")] = None
    role: Annotated[str | None, Option(_WITH_PROFILE + "role of this machine.", "ROLE")] = None
    node: Annotated[int, Option(_WITH_PROFILE + "number of this machine within the role.", min=0)] = 0
    rank: Annotated[int, Option(_WITH_PROFILE + "number of the server on this machine.", min=0)] = 0
    head: Annotated[str, Option(_WITH_PROFILE + "address of the role's node 0.", "HOST")] = ""
    ip: Annotated[str, Option(_WITH_PROFILE + "address of this machine.", "IP")] = ""
    nic: Annotated[str, Option(_WITH_PROFILE + "network interface of this machine.", "NAME")] = ""
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
    _: KW_ONLY
    long_tokens: Annotated[
        int | None,
        Option(
            "Length of the long prompt; 0: none.", min=0, max=10_000_000, default_text="half the context, at most 8192"
        ),
    ] = None


@dataclass(frozen=True)
class WatchOptions:
    """Options of `watch`.

    Attributes:
        polls: number of polls; 0: no end.
        model: the server's name for the model; "" is its first one.
        timeout: seconds for one answer. key: API key, "" for none.
        on_poll: called with the number of polls and the `WatchState` after each poll.
    """

    url: Annotated[str, Argument("URL", "Server or router, http://HOST:PORT.")]
    _: KW_ONLY
    canaries: Annotated[
        StrPath | None,
        Option("Questions with known answers, as --learn writes.", "FILE", default_text="three sums"),
    ] = None
    interval: Annotated[float, Option("Seconds from one poll to the next.", "S", min=0, max=86400)] = 10.0
    once: Annotated[bool, Option("Two polls, for cron: exit code 0 healthy, 1 garbage, 3 unreachable.")] = False
    textfile: Annotated[
        StrPath | None, Option("File of metrics for Prometheus' node exporter, written after each poll.", "FILE")
    ] = None
    polls: int = 0
    model: str = ""
    timeout: float = 60.0
    key: str = ""
    on_poll: Callable[[int, Any], object] | None = None


@dataclass(frozen=True)
class WatchCommandOptions(WatchOptions):
    """Options of `glm5-ascend watch`: those of `watch`, or `--learn`."""

    learn: Annotated[StrPath | None, Option("Write the answers of this healthy server to FILE, and end.", "FILE")] = (
        None
    )
