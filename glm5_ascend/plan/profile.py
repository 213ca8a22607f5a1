"""The `vllm serve` lines that run a plan: rendered from the layout, in the options of vllm-ascend 0.23."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from glm5_ascend.plan.layout import Engine

if TYPE_CHECKING:
    from glm5_ascend.plan.result import Plan


def commands(plan: Plan) -> Iterator[str]:
    """One line per kind of engine; addresses, ports and ranks are left to the launcher."""
    layout = plan.chosen.layout
    context = plan.workload.prompt + plan.workload.output
    if layout.prefill is None:
        yield f"run it: {_serve(plan, layout.decode, context)}"
        return
    yield f"prefill nodes: {_serve(plan, layout.prefill, context, role='kv_producer')}"
    yield f"decode nodes:  {_serve(plan, layout.decode, context, role='kv_consumer')}"


def _serve(plan: Plan, engine: Engine, context: int, role: str | None = None) -> str:
    parts = [
        "vllm serve DIR", f"--tensor-parallel-size {engine.tp}", f"--data-parallel-size {engine.dp}",
        "--enable-expert-parallel", f"--max-model-len {-(-context // 128) * 128}",
        f"--max-num-seqs {engine.sequences}", f"--max-num-batched-tokens {engine.batched_tokens}",
        f"--gpu-memory-utilization {engine.utilization:g}",
    ]  # fmt: skip
    if plan.model.quantization != "bf16":
        parts.append("--quantization ascend")
    if engine.eager_decode:
        parts.append("--enforce-eager")
    else:
        parts.append("--compilation-config " + _json({"cudagraph_mode": "FULL_DECODE_ONLY"}))
    if engine.dcp > 1:
        parts.append(f"--decode-context-parallel-size {engine.dcp} --cp-kv-cache-interleave-size 128")
    if engine.drafts:
        drafts = {"num_speculative_tokens": engine.drafts, "method": "deepseek_mtp", "enforce_eager": True}
        parts.append("--speculative-config " + _json(drafts))
    extra: dict[str, bool] = {}
    if role != "kv_consumer" and engine.split_prefill and engine.tp > 1:
        extra["enable_dsa_cp"] = True
    if plan.model.cache != "none":
        extra["enable_sparse_li_c8"] = True
    if plan.model.cache == "li+sfa":
        extra["enable_sparse_sfa_c8"] = True
    if role == "kv_consumer":
        extra["recompute_scheduler_enable"] = True
    if extra:
        parts.append("--additional-config " + _json(extra))
    if role:
        parts.append("--kv-transfer-config " + _json({"kv_connector": "MooncakeConnectorV1", "kv_role": role}))
    return f"HCCL_BUFFSIZE={engine.buffer_mb} " + " ".join(parts)


def _json(value: object) -> str:
    return "'" + json.dumps(value) + "'"
