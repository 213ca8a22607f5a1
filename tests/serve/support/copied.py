"""Load a quantized model and report how much memory of its own the process takes.  python copied.py DIR RESULT"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.serve.support.engine import start


def anonymous() -> int:
    """Bytes of this process that lie in no file: what compiled code has packed counts, mapped weights do not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    directory, result = map(Path, sys.argv[1:3])
    load, copied = CPUModelRunner.load_model, []

    def watched(*arguments: Any, **keywords: Any) -> None:
        before = anonymous()
        load(*arguments, **keywords)
        copied.append(anonymous() - before)

    CPUModelRunner.load_model = watched
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    start({"model": str(directory), "quantization": "ascend", "speculative_config": drafts, "max_model_len": 256})
    result.write_text(json.dumps({"copied": sum(copied)}))


if __name__ == "__main__":
    main()
