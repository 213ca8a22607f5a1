"""Keys of --additional-config that vllm-ascend 0.30.0rc2 takes; it refuses every other.

Fields of AscendConfig, and what `init_ascend_config` takes out before it builds one (ascend_config.py:565, 1846).
"""

from __future__ import annotations

KNOWN_KEYS = frozenset({
    "enable_cpu_binding", "multistream_dsv4_dsa_overlap", "multistream_engram_overlap", "enable_prefill_mc2",
    "multistream_overlap_shared_expert", "enable_kv_nz", "enable_mc2_hierarchy_comm", "enable_dsa_cp",
    "sfa_dcp_force_tmajor_restore", "enable_force_eplb", "enable_pcp_o_proj_weight_sharding",
    "enable_pcp_embedding_lmhead_weight_sharding", "draft_window_size", "mix_placement", "combine_quant_mode",
    "pa_shape_list", "mega_moe_max_tokens", "ascend_log_path", "dump_config_path", "mc2_comm_alg", "enable_fused_mc2",
    "enable_mlapo", "mlapo_keep_prefill_weights", "msmonitor_use_daemon", "enable_transpose_kv_cache_by_block",
    "weight_nz_mode", "ascend_compilation_config", "ascend_fusion_config", "ascend_warmup_config", "eplb_config",
    "rejection_sampler_config", "rl_config", "xlite_graph_config", "finegrained_tp_config", "scheduler_config",
    "dynamic_spec_config", "sparse_kv_offload_config", "kvpp_config", "enable_shared_expert_dp", "enable_sp_by_pass",
    "enable_sparse_sfa_turboquant", "enable_sparse_sfa_c8", "enable_sparse_li_c8", "enable_sparse_li_c4",
    "c8_enable_reshape_optim", "pd_tp_ratio", "pd_head_ratio", "num_head_replica", "refresh", "gdn_prefill_backend",
    "kda_prefill_backend", "enable_flashcomm1", "enable_kvpp", "dump_config", "enable_balance_scheduling",
    "recompute_scheduler_enable", "short_request_first_config", "profiling_chunk_config", "batch_job_sched_config",
})  # fmt: skip
