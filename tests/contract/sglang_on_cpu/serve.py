"""SGLang's own server on a CPU: HTTP, tokenizer manager, detokenizer, scheduler and worker are its code.

`python -m sglang_on_cpu.serve` takes the arguments of `sglang.launch_server`. What stands in for an NPU: the modules of
`npu_modules`, and the cache of `token_cache`.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang_on_cpu import start  # isort: skip  # noqa: F401  # before SGLang, in every process that is spawned

from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.server_args import prepare_server_args


def scheduler(*arguments: Any, **named: Any) -> None:
    """In a process of its own."""
    from sglang_on_cpu import token_cache

    token_cache.install()
    run_scheduler_process(*arguments, **named)


if __name__ == "__main__":
    launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=scheduler)
