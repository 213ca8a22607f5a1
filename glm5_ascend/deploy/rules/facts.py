"""Facts that rules use, and their values from a profile and the command line of an engine.

Facts of a machine come from `diagnosis.machine`, facts of a checkpoint from `diagnosis.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.engine_lines import VLLM_ASCEND_LINES
from glm5_ascend.serve.flags import parsed_flags

#: Every fact -> its meaning.
FACTS = {
    "npu": "the profile is for an Atlas",
    "engine": "`vllm` or `sglang`",
    "node": "kind of machine: `a2` or `a3`",
    "nodes": "number of machines of the role",
    "dies": "dies per machine that the profile uses",
    "weights_gib": "weights per die in GiB",
    "transformers": "version of transformers",
    "vllm_ascend": "version of vllm-ascend",
    "cann": "version of CANN",
    "triton": "Triton-Ascend is installed",
    "wanted_triton": "version of Triton-Ascend of the profile's engine line",
    "our_plugin": "vLLM loads this package's plugin, and the plugin can correct the indexer's rotation",
    "device_count": "number of NPUs visible on this machine",
    "hbm_gib": "HBM per die in GiB",
    "shm_gib": "size of /dev/shm in GiB",
    "memlock_unlimited": "the limit of locked memory (`ulimit -l`) is unlimited",
    "open_files": "limit of open files (`ulimit -n`)",
    "launch_blocking": "ASCEND_LAUNCH_BLOCKING is 1",
    "network_mount": "the checkpoint is on a network file system",
    "quantized": "the checkpoint has a quantization description",
    "model": "name of the checkpoint's directory",
    "weights": "`w4a8` or `w8a8`, by the type of the experts",
    "experts": "quantization type of the routed experts",
    "attention": "quantization type of q_a_proj, kv_a_proj and q_b_proj",
    "linear_types": "quantization types of all other linears",
    "kv_b_quantized": "kv_b_proj is quantized",
    "group_size": "group_size of the description; None if absent",
    "shared_indexers": "config.json has indexer_types with shared layers",
    "layers_without_indexer": "number of layers without indexer tensors in the index",
    "mtp_layers": "number of MTP layers in config.json",
    "mtp_tensors": "number of tensors of the MTP layer in the index",
    "tp": "tensor parallel size",
    "dp": "data parallel size",
    "pcp": "prefill context parallel size",
    "dcp": "decode context parallel size",
    "ep": "expert parallelism is on",
    "ep_size": "number of expert parallel ranks",
    "interleave": "--cp-kv-cache-interleave-size",
    "block_size": "tokens per block of the KV cache",
    "max_model_len": "--max-model-len: longest request in tokens",
    "max_num_seqs": "--max-num-seqs: largest number of running requests",
    "max_num_batched_tokens": "--max-num-batched-tokens: largest number of tokens of a step",
    "prefix_cache": "prefix caching is on",
    "chunked_prefill": "chunked prefill is on",
    "graph": "cudagraph_mode; `NONE` if eager",
    "capture_sizes": "number of given cudagraph_capture_sizes",
    "capture_multiple_of_tp": "a given capture size is a multiple of the tensor parallel size",
    "mtp": "draft tokens per step; 0 if off",
    "mtp_eager": "the draft model runs without graphs (enforce_eager of --speculative-config)",
    "draft_inherits": "SGLang: --quantization is set, but not --speculative-draft-model-quantization",
    "old_flag": "SGLang: a flag that the parser refuses",
    "kv_role": "`none`, `kv_producer`, `kv_consumer` or `kv_both`",
    "pd": "prefill and decode are apart",
    "pd_sizes_match": "parallel sizes in --kv-transfer-config are those of this server",
    "dcp_prefill": "decode context parallel size of the prefill nodes",
    "dcp_decode": "decode context parallel size of the decode nodes",
    "flashcomm1": "FlashComm is on (enable_flashcomm1)",
    "enable_dsa_cp": "DSA context parallelism is on",
    "fused_mc2": "value of enable_fused_mc2: fused MC2 dispatch and combine",
    "multistream_overlap": "multistream_overlap_shared_expert is on",
    "balance": "balance scheduling is on (enable_balance_scheduling)",
    "enable_mlapo": "MLAPO is set explicitly",
    "mlapo_active": "MLAPO is set, or on by default",
    "sfa_c8": "the latent caches are int8 (SFA-C8)",
    "li_c8": "the indexer's key caches are int8 (LI-C8)",
    "kv_nz": "enable_kv_nz is on: KV caches in NZ layout",
    "reduce_sample": "enable_reduce_sample is on",
    "recompute": "recompute_scheduler_enable is on",
    "mc2_hierarchy": "hierarchical MC2 between machines is on",
    "hccl_intra": "HCCL_INTRA_ROCE_ENABLE is 0 and HCCL_INTRA_PCIE_ENABLE is 1",
    "dynamic_eplb": "dynamic expert load balancing is on (eplb_config)",
    "profiling_chunk": "profiling_chunk_config is enabled",
    "kv_offload_sparse": "sparse_kv_offload_config is set",
    "lmhead_tp": "lmhead_tensor_parallel_size of finegrained_tp_config",
    "oproj_tp": "oproj_tensor_parallel_size of finegrained_tp_config",
    "embedding_tp": "embedding_tensor_parallel_size of finegrained_tp_config",
    "unknown_keys": "keys of --additional-config that the newest engine line refuses",
    "old_c8_keys": "int8 caches are set by keys of --additional-config",
    "new_c8_flags": "int8 caches are set by --kv-cache-dtype or --attention_config",
    "hccl_buffer": "HCCL_BUFFSIZE in MB",
    "exchange_buffer": "HCCL_BUFFSIZE in MB that dispatch and combine of a full decode step need",
}
#: Sizes of GLM-5: routed experts, experts per token, hidden size.
EXPERTS, EXPERTS_PER_TOKEN, HIDDEN = 256, 8, 6144
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
_NUMBERS = {
    "tp": ("tensor-parallel-size", 1), "dp": ("data-parallel-size", 1), "pcp": ("prefill-context-parallel-size", 1),
    "dcp": ("decode-context-parallel-size", 1), "interleave": ("cp-kv-cache-interleave-size", 1),
    "block_size": ("block-size", 128), "max_model_len": ("max-model-len", None), "max_num_seqs": ("max-num-seqs", None),
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
    "kv_b_quantized", "shared_indexers", "layers_without_indexer", "mtp_layers", "mtp_tensors", "transformers",
)  # fmt: skip


def of_profile(profile: Profile, role: Role) -> dict[str, Any]:
    """Facts of a profile without its flags, and of the checkpoint that it is for."""
    hardware = profile.hardware
    facts: dict[str, Any] = {
        "npu": profile.platform == "npu",
        "node": role.name if profile.alternatives else hardware["node"],
        "nodes": role.nodes,
        "dies": role.local_ranks * role.rank_dies,
    }
    facts |= {part: profile.weights[part] for part in ("experts", "attention") if part in profile.weights}
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


def of_command(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Facts of a `vllm serve` command line and its environment; later flags win."""
    flags = parsed_flags(argv)
    facts: dict[str, Any] = {"engine": "vllm", "draft_inherits": False, "old_flag": ""}
    numbers = {name: _number(flags.get(flag), default) for name, (flag, default) in _NUMBERS.items()}
    facts |= {name: number for name, number in numbers.items() if number is not None}
    facts["ep"] = flags.get("enable-expert-parallel") is True
    facts["ep_size"] = facts["tp"] * facts["dp"] if facts["ep"] else 1
    facts["prefix_cache"] = flags.get("enable-prefix-caching") is not False
    facts["chunked_prefill"] = flags.get("enable-chunked-prefill") is not False
    graph = _object(flags, "compilation-config")
    facts["graph"] = "NONE" if "enforce-eager" in flags else graph.get("cudagraph_mode", "FULL_AND_PIECEWISE")
    sizes = graph.get("cudagraph_capture_sizes") or []
    facts["capture_sizes"] = len(sizes)
    facts["capture_multiple_of_tp"] = any(size % facts["tp"] == 0 for size in sizes)
    draft = _object(flags, "speculative-config")
    facts["mtp"] = draft.get("num_speculative_tokens", 0) if "mtp" in str(draft.get("method")) else 0
    facts["mtp_eager"] = draft.get("enforce_eager", False)
    facts |= _of_transfer(_object(flags, "kv-transfer-config"), facts)
    additional = _object(flags, "additional-config")
    facts |= _of_additional(additional, environ) | _of_caches(flags, additional)
    facts["unknown_keys"] = ", ".join(sorted(set(additional) - (VLLM_ASCEND_LINES[-1].config_keys or set(additional))))
    facts["hccl_buffer"] = _variable(environ, "HCCL_BUFFSIZE", 200)
    if "max_num_seqs" in facts:
        facts["exchange_buffer"] = exchange_buffer(facts)
    facts["launch_blocking"] = environ.get("ASCEND_LAUNCH_BLOCKING", "0") == "1"
    return facts


def of_sglang_command(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Facts of an SGLang command line; later flags win. With DeepEP the expert parallel size is that of TP."""
    flags = parsed_flags(argv)
    tp = next((_number(flags[name], 1) for name in ("tp-size", "tensor-parallel-size", "tp") if name in flags), 1)
    ep_size = _number(flags.get("ep-size", flags.get("ep")), 1)
    ep = tp if flags.get("moe-a2a-backend") == "deepep" else ep_size
    drafting = "speculative-algorithm" in flags
    inherits = "quantization" in flags and "speculative-draft-model-quantization" not in flags
    old = next((name for name in OLD_SGLANG_FLAGS if name in flags), None)
    facts: dict[str, Any] = {
        "engine": "sglang", "tp": tp, "ep": ep > 1, "ep_size": ep,
        "mtp": _number(flags.get("speculative-num-steps"), 1) if drafting else 0,
        "draft_inherits": drafting and inherits, "old_flag": f"--{old}" if old else "",
        "prefix_cache": "disable-radix-cache" not in flags,
        "graph": "NONE" if "disable-cuda-graph" in flags else "FULL_DECODE_ONLY",
        "pd": flags.get("disaggregation-mode") in ("prefill", "decode"),
        "launch_blocking": environ.get("ASCEND_LAUNCH_BLOCKING", "0") == "1",
    }  # fmt: skip
    context = _number(flags.get("context-length"), 0)
    return facts | ({"max_model_len": context} if context else {})


def _of_transfer(transfer: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    role = transfer.get("kv_role", "none")
    apart = role in (PRODUCER, CONSUMER)
    facts_of_role = {"kv_role": role, "pd": apart}
    if not apart:
        return facts_of_role | {"pd_sizes_match": True, "dcp_prefill": 1, "dcp_decode": 1}
    side = "prefill" if role == PRODUCER else "decode"
    sizes = transfer.get("kv_connector_extra_config", {}).get(side, {})
    match = (sizes.get("tp_size"), sizes.get("dp_size")) == (facts["tp"], facts["dp"])
    return facts_of_role | {"pd_sizes_match": match, f"dcp_{side}": facts["dcp"]}


def _of_additional(additional: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """A key overrides its old environment variable, as in vllm-ascend's AscendConfig."""

    def switch(key: str, variable: str, default: int = 0) -> int:
        return int(additional[key]) if key in additional else _variable(environ, variable, default)

    parts = additional.get("finegrained_tp_config", {})
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
        "recompute": bool(additional.get("recompute_scheduler_enable")),
        "mc2_hierarchy": bool(additional.get("enable_mc2_hierarchy_comm"))
        or additional.get("mc2_comm_alg") == "hierarchy",
        "hccl_intra": (environ.get("HCCL_INTRA_ROCE_ENABLE"), environ.get("HCCL_INTRA_PCIE_ENABLE")) == ("0", "1"),
        "dynamic_eplb": bool(additional.get("eplb_config", {}).get("dynamic_eplb")),
        "profiling_chunk": bool(additional.get("profiling_chunk_config", {}).get("enabled")),
        "kv_offload_sparse": bool(additional.get("sparse_kv_offload_config")),
        "lmhead_tp": int(parts.get("lmhead_tensor_parallel_size", 0)),
        "oproj_tp": int(parts.get("oproj_tensor_parallel_size", 0)),
        "embedding_tp": int(parts.get("embedding_tensor_parallel_size", 0)),
    }


def _of_caches(flags: Mapping[str, Any], additional: dict[str, Any]) -> dict[str, Any]:
    """int8 caches, in both spellings."""
    latents = flags.get("kv-cache-dtype") == "int8"
    indexer = _object(flags, "attention-config").get("indexer_kv_dtype") == "int8"
    keys = [bool(additional.get(f"enable_sparse_{part}_c8")) for part in ("sfa", "li")]
    return {
        "sfa_c8": keys[0] or latents, "li_c8": keys[1] or indexer,
        "old_c8_keys": any(keys), "new_c8_flags": latents or indexer,
    }  # fmt: skip


def exchange_buffer(facts: Mapping[str, Any]) -> int:
    """HCCL_BUFFSIZE in MB for dispatch and combine of a decode step of GLM-5, by CANN's formula for two buffers."""
    if not facts["ep"] or facts["ep_size"] == 1:
        return 0
    tokens = min(512, -(-facts["max_num_seqs"] * (facts["mtp"] + 1) // facts["tp"]))
    local = EXPERTS // facts["ep_size"]
    sent = 512 * -(-(2 * HIDDEN + 64) // 512)
    received = (EXPERTS_PER_TOKEN + 1) * tokens * 2 * HIDDEN
    return int(-(-2 * (local * tokens * facts["ep_size"] * sent + received) // 2**20))


def _object(flags: Mapping[str, Any], name: str) -> dict[str, Any]:
    """JSON object of a flag; an empty one for a value that the engine itself refuses."""
    value = flags.get(name)
    return value if isinstance(value, dict) else {}


def _number(value: Any, default: Any) -> Any:
    return value if type(value) is int else default


def _variable(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default
