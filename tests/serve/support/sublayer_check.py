"""Answers in bf16 by the sublayers in one call, and op by op.  python sublayer_check.py DIR DRAFTS RESULT"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from glm5_kernels import ops
from tests.serve.support.engine import generate, start

QUESTION = "[gMASK]<sop><|user|>Hello<|assistant|></think>"


def main() -> None:
    directory, drafts, result = sys.argv[1:]
    engine: dict[str, Any] = {"model": directory, "dtype": "bfloat16", "quantization": "ascend"}
    if int(drafts):
        engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": int(drafts)}
    llm = start(engine | {"enable_prefix_caching": False})
    ids = llm.get_tokenizer().encode(QUESTION)
    prompts = [ids, ids * 9]  # the second one beyond index_topk
    calls, report = Counter[str](), {}
    for sublayer in (ops.MlaSublayer, ops.MlpSublayer):
        call = sublayer.__call__

        def counted(*arguments: Any, call: Any = call, name: str = sublayer.__name__) -> Any:
            calls[name] += 1
            return call(*arguments)

        sublayer.__call__ = counted  # type: ignore[method-assign, assignment]
    for name, most in (("one call", ops.MOST_TOKENS), ("op by op", 0)):
        ops.MOST_TOKENS = most
        calls.clear()
        report[name] = {"answers": generate(llm, prompts, 12), "calls": dict(calls)}
    Path(result).write_text(json.dumps(report))
