"""`glm5-ascend serve DIR [-- vllm flags]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.errors import CheckFailedError


def register(app: typer.Typer) -> None:
    app.command("serve", context_settings={"allow_extra_args": True})(serve)


def serve(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint, quantized or not.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    skip_verify: Annotated[bool, typer.Option("--skip-verify", help="Do not check a quantized DIR first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")] = False,
) -> int:
    """Serve over the OpenAI API with vLLM on this CPU. Everything after `--` goes to vLLM and wins."""
    from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
    from glm5_ascend.serve.launch import check_directory
    from glm5_ascend.serve.launch import serve as run

    check_directory(directory)
    if not skip_verify and not dry_run and (directory / DESCRIPTION_NAME).is_file():
        # vLLM's loader takes many broken checkpoints without a word; the headers alone tell most of them.
        from glm5_ascend.verify import verify

        report = verify(directory, deep=False)
        if not report.ok:
            for line in report.lines(quiet=True):
                print(line, file=sys.stderr)
            raise CheckFailedError(
                f"{directory}: broken checkpoint, it would serve garbage or fail to load",
                "quantize again, or --skip-verify to serve it all the same",
            )
    return run(directory, list(context.args), host=host, port=port, dry_run=dry_run)
