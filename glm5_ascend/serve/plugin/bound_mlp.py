"""The dense MLP and the mixture of experts bound to their operands, for a few tokens (`binding`)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLP, DeepseekV2MoE

from glm5_ascend.serve.plugin.binding import Calls, NotBoundError, room
from glm5_ascend.serve.plugin.experts import Int8Experts

_aten = torch.ops.aten


def bind_mlp(calls: Calls, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Add what vLLM's MLP or mixture of experts makes of x [T, hidden_size]; where its result will be."""
    if isinstance(layer, DeepseekV2MoE):
        return _bind_experts(calls, layer, x)
    if isinstance(layer, DeepseekV2MLP):
        return _bind_dense(calls, layer, x)
    raise NotBoundError


def _bind_dense(calls: Calls, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """`down_proj(silu(gate) * up)`."""
    gate, up = calls.linear("gate and up", layer.gate_up_proj, x).chunk(2, dim=-1)
    hidden = room().tensor("dense hidden", tuple(gate.shape), x.dtype)
    calls.add(_aten.silu.out, gate, out=hidden)
    calls.add(hidden.mul_, up)
    return calls.linear("dense", layer.down_proj, hidden)


def _bind_experts(calls: Calls, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The shared experts' output, and to it the routed ones' times the model's factor."""
    runner = layer.experts
    if layer.is_sequence_parallel or layer.shared_experts is None or layer.enable_eplb or runner.moe_config.dp_size > 1:
        raise NotBoundError
    shared = _bind_dense(calls, layer.shared_experts, x)
    weights, ids = _bind_router(calls, runner.router, layer.gate, x)
    routed = _bind_routed(calls, runner.routed_experts, x, weights, ids)
    factor = runner.routed_scaling_factor
    if factor != 1.0:
        calls.add(routed.mul_, factor)
    calls.add(shared.add_, routed)
    return shared


def _bind_router(calls: Calls, router: Any, gate: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 and experts int64 [T, k] of GLM-5's router: sigmoid, a bias that only chooses, one group."""
    bias = router.e_score_correction_bias
    ours = router.use_grouped_topk and router.num_expert_group == 1 and router.scoring_func == "sigmoid"
    if not ours or bias is None or router.capture_fn is not None or gate.weight.dtype != x.dtype:
        raise NotBoundError
    tokens, experts, places = len(x), bias.numel(), room()
    scores, biased = (places.tensor(use, (tokens, experts), torch.float32) for use in ("scores", "biased"))
    best, weights = (places.tensor(use, (tokens, router.top_k), torch.float32) for use in ("best", "expert weights"))
    ids, total = (
        places.tensor("experts", tuple(best.shape), torch.int64),
        places.tensor("total", (tokens, 1), best.dtype),
    )
    logits = places.tensor("logits", (tokens, experts), torch.float32)
    calls.add(logits.copy_, calls.linear("router", gate, x))
    calls.add(torch.sigmoid, logits, out=scores)
    calls.add(torch.add, scores, bias.data, out=biased)
    calls.add(torch.topk, biased, router.top_k, dim=-1, sorted=False, out=(best, ids))
    calls.add(torch.gather, scores, 1, ids, out=weights)
    if router.renormalize:
        calls.add(torch.sum, weights, dim=-1, keepdim=True, out=total)
        calls.add(weights.div_, total)
    if router.routed_scaling_factor != 1.0:
        calls.add(weights.mul_, router.routed_scaling_factor)
    return weights, ids


def _bind_routed(calls: Calls, experts: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The routed experts' output [T, hidden_size]."""
    if isinstance(experts.quant_method, Int8Experts):
        held = experts.w13_weight, experts.w13_weight_scale, experts.w2_weight, experts.w2_weight_scale
        w13, w13_scale, w2, w2_scale = (parameter.data for parameter in held)
        scales = w13_scale.squeeze(-1), w2_scale.squeeze(-1)
        return calls.bind("w4a8_moe", x, weights, ids, w13, scales[0], w2, scales[1], room())[0]
    out = room().tensor("routed", tuple(x.shape), x.dtype)
    narrow = room().tensor("experts", tuple(ids.shape), torch.int32)
    calls.add(narrow.copy_, ids)
    compute = getattr(getattr(experts.quant_method, "moe_kernel", None), "fused_experts", None)
    if not isinstance(compute, CPUUnquantizedExperts) or experts.expert_map is not None:
        raise NotBoundError
    given = dict.fromkeys(("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta", "expert_map"))
    calls.add(
        compute.apply, out, x, experts.w13_weight, experts.w2_weight, weights, narrow, experts.activation,
        experts.global_num_experts, apply_router_weight_on_input=experts.apply_router_weight_on_input, **given,
    )  # fmt: skip
    return out
