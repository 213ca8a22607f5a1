"""Facts for the rules, by name: of a profile, of an engine's command line in normal form, and of its environment.

Those of this machine come from `machine`, of a checkpoint from `preflight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rules.variables import bad_variables, number, unknown_variables
from glm5_ascend.engine_lines import SGLANG_05, STABLE, EngineLine, exchange_buffer_mb
from glm5_ascend.serve.flag_table import flag_table
from glm5_ascend.serve.flags import LI_KEY, SFA_KEY, SPECULATIVE, parsed_flags

#: Beginnings of variables that go with runner V1 and the environment switches (roadmap of vllm-ascend, #15067).
OLD_SWITCHES = ("VLLM_ASCEND_", "VLLM_USE_V2_MODEL_RUNNER")
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
_NUMBERS = {
    "tp": ("tensor-parallel-size", 1), "dp": ("data-parallel-size", 1), "pp": ("pipeline-parallel-size", 1),
    "pcp": ("prefill-context-parallel-size", 1), "dcp": ("decode-context-parallel-size", 1),
    "interleave": ("cp-kv-cache-interleave-size", 1), "block_size": ("block-size", 128),
    "max_model_len": ("max-model-len", None), "max_num_seqs": ("max-num-seqs", None),
    "max_num_batched_tokens": ("max-num-batched-tokens", None),
}  # fmt: skip
#: Flags of published SGLang commands that the parser of the SGLang line refuses; rule S3 names the replacements.
OLD_SGLANG_FLAGS = (
    "cuda-graph-bs", "cuda-graph-max-bs", "enable-nsa-prefill-context-parallel", "nsa-prefill-cp-mode",
    "prefill-round-robin-balance",
)  # fmt: skip
#: Facts of machine, checkpoint and profile that mean the same for every engine. Most rules use vllm-ascend's flags and
#: versions. These facts stay unknown for SGLang, so the rules are not checked.
COMMON = (
    "npu", "node", "nodes", "dies", "weights_gib", "device_count", "hbm_gib", "shm_gib", "memlock_unlimited",
    "open_files", "network_mount", "quantized", "model", "weights", "experts", "attention", "linear_types",
    "kv_b_quantized", "shared_indexers", "linear_attention", "layers_without_indexer", "mtp_layers", "mtp_tensors",
    "transformers", "num_experts", "num_heads",
)  # fmt: skip


class ModelSizes(NamedTuple):
    """Sizes of a model that decide on its layout and exchange between experts; the defaults are GLM-5's."""

    experts: int = 256
    experts_per_token: int = 8
    hidden: int = 6144
    heads: int = 64


def of_profile(profile: Profile, role: Role) -> dict[str, Any]:
    """Facts of a profile without its flags, and of the checkpoint that it is for."""
    facts: dict[str, Any] = {
        "npu": profile.platform == "npu",
        "node": profile.hardware["node"],
        "nodes": role.nodes,
        "dies": role.local_ranks * role.rank_dies,
    }
    facts["linear_attention"] = any("Flash" in model for model in profile.models)
    facts |= {linears: profile.weights[linears] for linears in ("experts", "attention") if linears in profile.weights}
    facts |= {"quantized": facts["npu"], "weights": short_name(profile.weights["experts"])}
    if "weights_gib" in profile.memory:
        facts["weights_gib"] = profile.memory["weights_gib"]
    if {"prefill", "decode"} <= profile.roles.keys():
        for side in ("prefill", "decode"):
            facts[f"dcp_{side}"] = profile.roles[side].args.get("decode-context-parallel-size", 1)
    return facts


def short_name(experts: str) -> str:
    """Name of the recipe for a quantization type of experts."""
    return {"W4A8_DYNAMIC": "w4a8", "W8A8_DYNAMIC": "w8a8"}.get(experts, "float")


def of_command(
    argv: Sequence[str], environ: Mapping[str, str], line: EngineLine = STABLE, sizes: ModelSizes | None = None
) -> dict[str, Any]:
    """Facts of a `vllm serve` command line and its environment.

    Args:
        argv: in normal form; `{words}` of a profile may be unfilled.
        line: the engine line whose flags it has. sizes: of the checkpoint.
    """
    table, model = flag_table(line.flags), sizes or ModelSizes()
    flags = parsed_flags(argv, table)
    facts: dict[str, Any] = {"engine": "vllm", "draft_inherits": False, "old_flag": "", "replaced_json": ""}
    facts |= {"num_experts": model.experts, "num_heads": model.heads}
    facts["quantization"] = str(flags.get("quantization", ""))
    numbers = {name: _number(flags.get(flag), default) for name, (flag, default) in _NUMBERS.items()}
    facts |= {name: value for name, value in numbers.items() if value is not None}
    facts["ep"] = flags.get("enable-expert-parallel") is True
    facts["ep_size"] = facts["tp"] * facts["dp"] if facts["ep"] else 1
    facts["prefix_cache"] = flags.get("enable-prefix-caching") is not False
    facts["chunked_prefill"] = flags.get("enable-chunked-prefill") is not False
    facts["async_scheduling"] = flags.get("async-scheduling") is not False
    facts["lora"] = flags.get("enable-lora") is True
    facts["cpu_offload"] = flags.get("cpu-offload-gb", 0) not in (0, 0.0, "0")
    facts |= _of_graphs(flags, facts["tp"]) | _of_drafts(flags)
    facts |= _of_transfer(_object(flags, "kv-transfer-config"), facts)
    additional = _object(flags, "additional-config")
    facts |= _of_additional(additional, environ) | _of_caches(flags, additional)
    keys = table.flags.get("additional-config")
    facts["unknown_keys"] = ", ".join(sorted(set(additional) - set(keys))) if isinstance(keys, dict) else ""
    facts["hccl_buffer"] = number(environ, "HCCL_BUFFSIZE", 200)
    facts["abort_timeout"] = number(environ, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480)
    if "max_num_seqs" in facts:
        ranks = facts["max_num_seqs"], facts["mtp"], facts["tp"], facts["ep_size"]
        facts["exchange_buffer"] = exchange_buffer_mb(*ranks, model.experts, model.experts_per_token, model.hidden)
    return facts | of_environment(environ, line)


def of_environment(environ: Mapping[str, str], line: EngineLine) -> dict[str, Any]:
    """Facts of the environment that every engine has."""
    return {
        "launch_blocking": environ.get("ASCEND_LAUNCH_BLOCKING", "0") == "1",
        "unknown_variables": ", ".join(unknown_variables(environ)),
        "old_switches": ", ".join(sorted(n for n in environ if n.startswith(OLD_SWITCHES))),
        "bad_variables": "; ".join(bad_variables(environ, line)),
    }


def of_sglang_command(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Facts of an SGLang command line. With DeepEP the expert parallel size is that of TP."""
    flags = parsed_flags(argv, flag_table(SGLANG_05.flags))
    tp = next((_number(flags[name], 1) for name in ("tp-size", "tensor-parallel-size", "tp") if name in flags), 1)
    ep_size = next((_number(flags[name], 1) for name in ("ep-size", "expert-parallel-size", "ep") if name in flags), 1)
    ep = tp if flags.get("moe-a2a-backend") == "deepep" else ep_size
    drafting = "speculative-algorithm" in flags
    inherits = "quantization" in flags and "speculative-draft-model-quantization" not in flags
    old = next((name for name in OLD_SGLANG_FLAGS if name in flags), None)
    facts: dict[str, Any] = {
        "engine": "sglang", "tp": tp, "ep": ep > 1, "ep_size": ep,
        "mtp": _number(flags.get("speculative-num-steps"), 1) if drafting else 0,
        "draft_inherits": drafting and inherits, "old_flag": f"--{old}" if old else "",
        "quantization": str(flags.get("quantization", "")),
        "prefix_cache": "disable-radix-cache" not in flags,
        "graph": "NONE" if "disable-cuda-graph" in flags else "FULL_DECODE_ONLY",
        "pd": flags.get("disaggregation-mode") in ("prefill", "decode"),
    }  # fmt: skip
    context = _number(flags.get("context-length"), 0)
    return facts | of_environment(environ, SGLANG_05) | ({"max_model_len": context} if context else {})


def connectors(transfer: Any) -> Iterator[dict[str, Any]]:
    """A configuration of --kv-transfer-config, and those inside of it, as MultiConnector has them."""
    if isinstance(transfer, dict):
        yield transfer
        extra = transfer.get("kv_connector_extra_config")
        inner = extra.get("connectors") if isinstance(extra, dict) else None
        for connector in inner if isinstance(inner, list) else ():
            yield from connectors(connector)


def _of_graphs(flags: Mapping[str, Any], tp: int) -> dict[str, Any]:
    graph = _object(flags, "compilation-config")
    mode = str(graph.get("cudagraph_mode") or "FULL_AND_PIECEWISE").upper()
    sizes = graph.get("cudagraph_capture_sizes")
    whole = [size for size in sizes if type(size) is int] if isinstance(sizes, list) else []
    return {
        "graph": "NONE" if flags.get("enforce-eager") is True else mode, "capture_sizes": len(whole),
        "capture_multiple_of_tp": any(size % tp == 0 for size in whole),
    }  # fmt: skip


def _of_drafts(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Draft tokens: of the checkpoint's MTP layer, unless another method is named."""
    draft = dict(_object(flags, "speculative-config"))
    draft |= {key: flags[flag] for flag, key in SPECULATIVE.items() if flag in flags}
    method = str(draft.get("method") or "")
    tokens = _number(draft.get("num_speculative_tokens"), 0)
    return {
        "mtp": tokens if "mtp" in method or not method else 0, "draft_method": method,
        "mtp_eager": bool(draft.get("enforce_eager")),
    }  # fmt: skip


def _of_transfer(transfer: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    every = list(connectors(transfer)) if transfer else []
    names = {str(connector.get("kv_connector", "")) for connector in every}
    roles = [connector["kv_role"] for connector in every if connector.get("kv_role") in (PRODUCER, CONSUMER)]
    role = next(iter(roles), str(transfer.get("kv_role", "none")))
    facts_of_role = {"kv_role": role, "pd": bool(roles), "kv_pool": any("Store" in name for name in names)}
    if not roles:
        return facts_of_role | {"pd_sizes_match": True, "dcp_prefill": 1, "dcp_decode": 1}
    side = "prefill" if role == PRODUCER else "decode"
    extras = (connector.get("kv_connector_extra_config") for connector in every)
    sizes = [extra[side] for extra in extras if isinstance(extra, dict) and isinstance(extra.get(side), dict)]
    match = all((size.get("tp_size"), size.get("dp_size")) == (facts["tp"], facts["dp"]) for size in sizes)
    needed = any("Mooncake" in name and "Store" not in name for name in names)
    return facts_of_role | {"pd_sizes_match": match and bool(sizes or not needed), f"dcp_{side}": facts["dcp"]}


def _of_additional(additional: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """A key overrides its old environment variable, as in vllm-ascend's AscendConfig."""
    scheduler = {**additional, **_object(additional, "scheduler_config")}  # 0.30 has these switches there

    def switch(key: str, variable: str, default: int = 0) -> int:
        value = scheduler.get(key)
        return int(value) if isinstance(value, int) else number(environ, variable, default)

    parts, eplb = _object(additional, "finegrained_tp_config"), _object(additional, "eplb_config")
    return {
        "flashcomm1": bool(switch("enable_flashcomm1", "VLLM_ASCEND_ENABLE_FLASHCOMM1")),
        "balance": bool(switch("enable_balance_scheduling", "VLLM_ASCEND_BALANCE_SCHEDULING")),
        "fused_mc2": switch("enable_fused_mc2", "VLLM_ASCEND_ENABLE_FUSED_MC2"),
        "mlapo_active": bool(switch("enable_mlapo", "VLLM_ASCEND_ENABLE_MLAPO", 1)),
        "enable_mlapo": bool(switch("enable_mlapo", "VLLM_ASCEND_ENABLE_MLAPO")),
        "enable_dsa_cp": bool(additional.get("enable_dsa_cp")),
        "multistream_overlap": bool(additional.get("multistream_overlap_shared_expert")),
        "kv_nz": bool(additional.get("enable_kv_nz")),
        "reduce_sample": bool(additional.get("enable_reduce_sample")),
        "recompute": bool(scheduler.get("recompute_scheduler_enable")),
        "mc2_hierarchy": bool(additional.get("enable_mc2_hierarchy_comm"))
        or additional.get("mc2_comm_alg") == "hierarchy",
        "hccl_intra": (environ.get("HCCL_INTRA_ROCE_ENABLE"), environ.get("HCCL_INTRA_PCIE_ENABLE")) == ("0", "1"),
        "dynamic_eplb": bool(eplb.get("dynamic_eplb")),
        "redundant_experts": _number(eplb.get("num_redundant_experts"), 0),
        "profiling_chunk": bool(_object(scheduler, "profiling_chunk_config").get("enabled")),
        "kv_offload_sparse": bool(additional.get("sparse_kv_offload_config")),
        "lmhead_tp": _number(parts.get("lmhead_tensor_parallel_size"), 0),
        "oproj_tp": _number(parts.get("oproj_tensor_parallel_size"), 0),
        "embedding_tp": _number(parts.get("embedding_tensor_parallel_size"), 0),
    }


def _of_caches(flags: Mapping[str, Any], additional: dict[str, Any]) -> dict[str, Any]:
    """int8 caches, in both spellings."""
    dtype = str(flags.get("kv-cache-dtype", "auto"))
    indexer = _object(flags, "attention-config").get("indexer_kv_dtype") == "int8"
    keys = [bool(additional.get(key)) for key in (SFA_KEY, LI_KEY)]
    return {
        "sfa_c8": keys[0] or dtype == "int8", "li_c8": keys[1] or indexer, "kv_cache_dtype": dtype,
        "old_c8_keys": any(keys), "new_c8_flags": dtype == "int8" or indexer,
    }  # fmt: skip


def _object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """JSON object of a flag or key; an empty one for a value that the engine itself refuses."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _number(value: Any, default: Any) -> Any:
    return value if type(value) is int and value > 0 else default
