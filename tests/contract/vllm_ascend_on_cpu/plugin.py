"""vllm-ascend's attention as `attention` runs it, with our package installed beside it: its entry points are found.

    python -m vllm_ascend_on_cpu.plugin CHECKPOINT SITE SCHEMAS OUT

SITE: where pip installed glm5-ascend. OUT.json gets what our plugin logged and what it changed. With
`GLM5_KERNELS=triton` the kernels run in Triton's interpreter, its errors in bf16 corrected.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

SITE, OUT = sys.argv[2], Path(sys.argv[4])
sys.path.insert(0, SITE)  # before vLLM looks for entry points

from vllm_ascend_on_cpu import attention  # noqa: E402

SAID: list[str] = []


class Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


def prepared(model: Any, hf: object, topk: list[Any]) -> dict[str, Any]:
    from vllm_ascend.device.device_op import DeviceOperator

    if os.environ.get("GLM5_KERNELS") == "triton":
        sys.path.append(str(Path(__file__).resolve().parents[3]))
        from tests.proof import interpreter

        interpreter.correct()
    if os.environ.get("GLM5_KERNELS") in ("reference", "triton"):  # ours are asked: keep what they answer
        ours = DeviceOperator.indexer_select_post_process

        def kept(*arguments: Any, **named: Any) -> Any:
            answer = ours(*arguments, **named)
            topk.append(answer[:, 0])
            return answer

        DeviceOperator.indexer_select_post_process = staticmethod(kept)
    return RUN(model, hf, topk)


def main() -> None:
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    logging.getLogger("vllm.glm5_ascend").addHandler(Keep())
    load_general_plugins()
    for entry in importlib.metadata.entry_points(group="vllm.general_plugins"):
        if entry.name == "glm5_ascend":
            entry.load()()  # a second time, as other processes may
    sys.argv[1:] = [sys.argv[1], SITE, sys.argv[3], str(OUT)]
    attention.main()
    names = [entry.name for entry in importlib.metadata.entry_points(group="vllm.platform_plugins")]
    answers = {entry.name: entry.load()() for entry in importlib.metadata.entry_points(group="vllm.platform_plugins")}
    report = {
        "platforms": names,
        "answers": answers,
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "general": sorted(entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")),
        "said": SAID,
    }
    OUT.with_suffix(".json").write_text(json.dumps(report))


RUN, attention.run = attention.run, prepared
if __name__ == "__main__":
    main()
