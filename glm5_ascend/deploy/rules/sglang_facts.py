"""Facts of an SGLang command line, and the facts that have the same meaning for SGLang.

Most rules use vllm-ascend's flags and versions. These facts stay unknown for SGLang, so the rules are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5_ascend.serve.flags import given_flags, value_of

#: Flags of published commands that the parser of the SGLang line refuses -> their replacement.
OLD_FLAGS = {
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--nsa-prefill-cp-mode": "--cp-strategy",
    "--prefill-round-robin-balance": "nothing: leave it out",
}
#: Facts of machine, checkpoint and profile that mean the same for every engine.
COMMON = (
    "npu", "node", "nodes", "dies", "weights_gib", "device_count", "hbm_gib", "shm_gib", "memlock_unlimited",
    "open_files", "network_mount", "quantized", "model", "weights", "experts", "attention", "linear_types",
    "kv_b_quantized", "shared_indexers", "layers_without_indexer", "mtp_layers", "mtp_tensors", "transformers",
)  # fmt: skip


def of_sglang_command(argv: list[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Facts of a command line; later flags win. With DeepEP the expert parallel size is that of TP."""
    flags = given_flags(argv)
    tp = _number(value_of(argv, "--tp-size") or value_of(argv, "--tensor-parallel-size") or value_of(argv, "--tp"), 1)
    ep_size = value_of(argv, "--ep-size") or value_of(argv, "--ep")
    ep = tp if value_of(argv, "--moe-a2a-backend") == "deepep" else _number(ep_size, 1)
    drafting = "--speculative-algorithm" in flags
    inherits = not flags & {"--speculative-draft-model-quantization"} and "--quantization" in flags
    mode = value_of(argv, "--disaggregation-mode")
    facts: dict[str, Any] = {
        "engine": "sglang", "tp": tp, "ep": ep > 1, "ep_size": ep,
        "mtp": _number(value_of(argv, "--speculative-num-steps"), 1) if drafting else 0,
        "draft_inherits": drafting and inherits,
        "old_flag": next((flag for flag in OLD_FLAGS if flag in flags), ""),
        "prefix_cache": "--disable-radix-cache" not in flags,
        "graph": "NONE" if "--disable-cuda-graph" in flags else "FULL_DECODE_ONLY",
        "pd": mode in ("prefill", "decode"),
        "launch_blocking": environ.get("ASCEND_LAUNCH_BLOCKING", "0") == "1",
    }  # fmt: skip
    context = _number(value_of(argv, "--context-length"), 0)
    return facts | ({"max_model_len": context} if context else {})


def _number(text: str, default: int) -> int:
    return int(text) if text.isdecimal() else default
