"""What SGLang's own parser and resolver make of command lines: {"name": argv behind the program} -> what it became."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.server_args import ServerArgs

FACTS = (
    "tp_size", "ep_size", "dp_size", "nnodes", "node_rank", "dist_init_addr", "moe_a2a_backend", "quantization",
    "page_size", "speculative_algorithm", "speculative_draft_model_quantization", "disaggregation_mode",
    "disaggregation_transfer_backend", "attention_backend", "disable_radix_cache", "context_length",
    "reasoning_parser", "tool_call_parser", "host", "port", "served_model_name", "max_running_requests",
    "disable_overlap_schedule",
)  # fmt: skip


def resolved(argv: list[str]) -> dict[str, Any]:
    parser, message = argparse.ArgumentParser(), io.StringIO()
    ServerArgs.add_cli_args(parser)
    try:
        with contextlib.redirect_stderr(message):
            parsed = parser.parse_args(argv)
    except SystemExit:
        return {"error": message.getvalue().strip().splitlines()[-1]}
    args = ServerArgs.from_cli_args(parsed)
    args.resolve_once()
    view = resolving_view(args)
    graph = view.cuda_graph_config
    decode = None if graph is None else list(graph.decode.bs or ())
    return {name: getattr(view, name) for name in FACTS} | {"decode_graphs": decode}


def run(out: Path, argv: list[str]) -> None:
    try:
        answer = resolved(argv)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    (out / "answer.json").write_text(json.dumps(answer, indent=1, default=str))
