"""`glm5-ascend serve DIR [-- vllm flags]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("serve", context_settings={"allow_extra_args": True})(serve)


def serve(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint, quantized or not.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")] = False,
) -> int:
    """Serve over the OpenAI API with vLLM on this CPU. Everything after `--` goes to vLLM and wins."""
    from glm5_ascend.serve.launch import serve as run

    return run(directory, list(context.args), host=host, port=port, dry_run=dry_run)
