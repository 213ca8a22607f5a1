"""Options of `glm5-ascend serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PROFILE_ONLY = "For --profile with several machines: "

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint, quantized or not.")]
Host = Annotated[
    str | None,
    typer.Option(metavar="HOST", show_default="127.0.0.1, or the profile's", help="Address to listen on."),
]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, show_default="8000, or the profile's", help="Port to listen on.")
]
Profile = Annotated[
    str | None, typer.Option(metavar="NAME", help="Deploy profile; `glm5-ascend deploy list` shows them.")
]
Role = Annotated[str | None, typer.Option(help=PROFILE_ONLY + "which role this one has.")]
Node = Annotated[int, typer.Option(min=0, help=PROFILE_ONLY + "its number within the role.")]
Rank = Annotated[int, typer.Option(min=0, help=PROFILE_ONLY + "which of its servers.")]
Head = Annotated[str, typer.Option(help=PROFILE_ONLY + "address of the role's node 0.")]
Ip = Annotated[str, typer.Option(help=PROFILE_ONLY + "this machine's address.")]
Nic = Annotated[str, typer.Option(help=PROFILE_ONLY + "its network interface.")]
SkipVerify = Annotated[bool, typer.Option("--skip-verify", help="Do not check a quantized DIR first.")]
Log = Annotated[
    Path | None, typer.Option(metavar="FILE", show_default="in your folder for logs", help="Where vLLM's log goes.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show vLLM's log instead.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: as one JSON object on stdout.")]
