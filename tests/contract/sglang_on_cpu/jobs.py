"""Several jobs, each in a fork of a process that has imported SGLang: `python -m sglang_on_cpu.jobs JOBS`.

JOBS is a JSON list of {"do": "load" | "resolve", "out": folder, "ranks": 1, ...}; the other keys are the
arguments of that module's `run`. A job that fails leaves its traceback in OUT/error.txt, and the others go on.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from sglang_on_cpu import load, resolve, start

RUN = {"load": load.run, "resolve": resolve.run}


def child(job: dict[str, Any], out: Path) -> int:
    """Start one rank of a job; returns its process."""
    pid = os.fork()
    if pid:
        return pid
    code, out_again = 1, dict(job)
    try:
        log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        RUN[out_again.pop("do")](out=out, **out_again)
        code = 0
    except BaseException:
        (out / "error.txt").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        folder, ranks, port = Path(job.pop("out")), job.pop("ranks", 1), start.free_port()
        started = []
        for rank in range(ranks):
            out = folder / f"rank{rank}" if ranks > 1 else folder
            out.mkdir(parents=True)
            started.append(child(job | ({"rank": rank, "port": port} if ranks > 1 else {}), out))
        for pid in started:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
