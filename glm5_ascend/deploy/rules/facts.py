"""Facts that rules use, and their values from a profile.

Facts of a command line come from `command_facts`, of a machine from `diagnosis.machine`, of a checkpoint from
`diagnosis.preflight`.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role

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
    "our_plugin": "vLLM loads this package's plugin, which corrects the indexer's rotation",
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
    "shared_indexers": "config.json has shared layers in indexer_types, and in the keys that vLLM reads",
    "linear_attention": "the model has layers of linear attention (GLM-5.3-Flash)",
    "layers_without_indexer": "number of layers without indexer tensors in the index",
    "mtp_layers": "number of MTP layers in config.json",
    "mtp_tensors": "number of tensors of the MTP layer in the index",
    "num_experts": "n_routed_experts of config.json; 256 without a checkpoint",
    "num_heads": "num_attention_heads of config.json; 64 without a checkpoint",
    "stage_on_shared": "first layer of a pipeline stage that has no indexer of its own; 0: none",
    "tp": "tensor parallel size",
    "dp": "data parallel size",
    "pp": "pipeline parallel size",
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
    "draft_method": "method of --speculative-config; empty without one",
    "async_scheduling": "asynchronous scheduling is on, as it is by default",
    "replaced_json": "flags with a dot, such as --a.b, that replace the profile's whole JSON in --a",
    "kv_cache_dtype": "--kv-cache-dtype",
    "mtp_eager": "the draft model runs without graphs (enforce_eager of --speculative-config)",
    "quantization": "--quantization; empty without it",
    "draft_inherits": "SGLang: --quantization is set, but not --speculative-draft-model-quantization",
    "old_flag": "SGLang: a flag that the parser refuses",
    "kv_role": "`none`, `kv_producer`, `kv_consumer` or `kv_both`",
    "pd": "prefill and decode are apart",
    "pd_sizes_match": "parallel sizes in --kv-transfer-config are those of this server",
    "cpu_offload": "--cpu-offload-gb moves weights to the host",
    "lora": "--enable-lora is set",
    "kv_pool": "a KV pool is connected (AscendStoreConnector)",
    "abort_timeout": "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT in seconds",
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
    "redundant_experts": "num_redundant_experts of eplb_config",
    "profiling_chunk": "profiling_chunk_config is enabled",
    "kv_offload_sparse": "sparse_kv_offload_config is set",
    "lmhead_tp": "lmhead_tensor_parallel_size of finegrained_tp_config",
    "oproj_tp": "oproj_tensor_parallel_size of finegrained_tp_config",
    "embedding_tp": "embedding_tensor_parallel_size of finegrained_tp_config",
    "unknown_keys": "keys of --additional-config that this engine line does not have",
    "unknown_variables": "environment variables VLLM_ASCEND_* and HCCL_* that no document names",
    "old_switches": "environment switches that vllm-ascend removes after 0.30",
    "bad_variables": "environment variables whose values the engine cannot read",
    "old_c8_keys": "int8 caches are set by keys of --additional-config",
    "new_c8_flags": "int8 caches are set by --kv-cache-dtype or --attention_config",
    "hccl_buffer": "HCCL_BUFFSIZE in MB",
    "exchange_buffer": "HCCL_BUFFSIZE in MB that dispatch and combine of a full decode step need",
}
#: Facts of machine, checkpoint and profile that mean the same for every engine. Most rules use vllm-ascend's flags and
#: versions. These facts stay unknown for SGLang, so the rules are not checked.
COMMON = (
    "npu", "node", "nodes", "dies", "weights_gib", "device_count", "hbm_gib", "shm_gib", "memlock_unlimited",
    "open_files", "network_mount", "quantized", "model", "weights", "experts", "attention", "linear_types",
    "kv_b_quantized", "shared_indexers", "linear_attention", "layers_without_indexer", "mtp_layers", "mtp_tensors",
    "transformers", "num_experts", "num_heads",
)  # fmt: skip


def of_profile(profile: Profile, role: Role) -> dict[str, Any]:
    """Facts of a profile without its flags, and of the checkpoint that it is for."""
    facts: dict[str, Any] = {
        "npu": profile.platform == "npu",
        "node": profile.hardware["node"],
        "nodes": role.nodes,
        "dies": role.local_ranks * role.rank_dies,
    }
    facts["linear_attention"] = any("Flash" in model for model in profile.models)
    facts |= {"num_experts": 256, "num_heads": 64, "replaced_json": ""}
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
