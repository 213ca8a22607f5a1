"""What runs a plan: the profile of deploy/ with its layout, and `vllm serve` lines in the options of vllm-ascend 0.23.

A profile is one if machine, number of nodes, types of the weights and the parallel sizes of every role are the plan's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from glm5_ascend.deploy.profiles.engines import VLLM
from glm5_ascend.deploy.profiles.load import Profile, Role, load, names
from glm5_ascend.plan.layout import Engine

if TYPE_CHECKING:
    from glm5_ascend.plan.result import Plan


#: Profiles of SGLang exist; what the planner says of speed and memory is not about them.
NOT_MODELLED = "SGLang: not modelled; the speeds are fitted to vllm-ascend, for SGLang measure"


def commands(plan: Plan) -> Iterator[str]:
    """The profile and how to render it, if there is one; and one line per kind of engine, whose addresses, ports and
    ranks are left to the launcher."""
    if plan.cluster.hardware.measured_on is not None:
        yield "run it: glm5-ascend serve DIR"
        return
    name = profile_of(plan)
    if name is not None:
        yield f"profile: {name}"
        yield f"run it: glm5-ascend serve DIR --profile {name}"
        yield f"or as files: glm5-ascend deploy render --profile {name} --to shell"
    else:
        yield "profile: none of deploy/profiles has this layout; these lines do:"
    yield NOT_MODELLED
    layout = plan.chosen.layout
    context = plan.workload.prompt + plan.workload.output
    if layout.prefill is None:
        yield f"run it: {_serve(plan, layout.decode, context)}"
        return
    yield f"prefill nodes: {_serve(plan, layout.prefill, context, role='kv_producer')}"
    yield f"decode nodes:  {_serve(plan, layout.decode, context, role='kv_consumer')}"


def profile_of(plan: Plan) -> str | None:
    """Name of the first profile of deploy/ that does the chosen layout with vLLM; None if none does."""
    return next((name for name in names() if load(name).engine == VLLM and _does(load(name), plan)), None)


def _does(profile: Profile, plan: Plan) -> bool:
    layout, cluster = plan.chosen.layout, plan.cluster
    engines = {"decode": layout.decode} | ({"prefill": layout.prefill} if layout.prefill else {})
    own = {
        role.args.get("kv-transfer-config", {}).get("kv_role", "kv_consumer"): role for role in profile.roles.values()
    }
    roles = {"decode": own.get("kv_consumer"), "prefill": own.get("kv_producer")}
    if profile.alternatives or len(profile.roles) != len(engines) or layout.replicas != 1:
        return False
    if (profile.hardware["node"], profile.hardware["nodes"]) != (cluster.hardware.name, cluster.nodes):
        return False
    if (profile.weights["experts"], profile.weights["attention"]) != (plan.model.expert_type, _attention(plan)):
        return False
    return all((role := roles[name]) is not None and _sizes(role) == (engine.tp, engine.dp, engine.dcp)
               for name, engine in engines.items())  # fmt: skip


def _attention(plan: Plan) -> str:
    return plan.model.type_of(0, "self_attn.q_a_proj")


def _sizes(role: Role) -> tuple[int, int, int]:
    tp, dp, dcp = (int(role.args.get(f"{kind}-parallel-size", 1)) for kind in ("tensor", "data", "decode-context"))
    return tp, dp, dcp


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
