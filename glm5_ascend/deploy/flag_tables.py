"""Writes deploy/flags/NAME.json, the flags that an engine's own parser takes.

    python -m glm5_ascend.deploy.flag_tables NAME PYTHON

NAME: `flags` of a row of engine_lines.py. PYTHON: interpreter that has this engine, for example that of the folder
which `glm5-ascend rehearse --prepare` makes, or of the contract tests' SGLang.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from glm5_ascend.deploy.rehearsal.run import run_inside
from glm5_ascend.deploy.rules.command_facts import OLD_SGLANG_FLAGS
from glm5_ascend.engine_lines import LINES, SGLANG, SGLANG_05, VLLM, VLLM_ASCEND_023, VLLM_ASCEND_030
from glm5_ascend.files.resources import data_dir

_SWITCHES = (
    "enable_balance_scheduling", "enable_cpu_binding", "enable_dsa_cp", "enable_flashcomm1", "enable_kv_nz",
    "enable_mc2_hierarchy_comm", "enable_mlapo", "enable_prefill_mc2", "enable_shared_expert_dp",
    "enable_sparse_li_c8", "enable_sparse_sfa_c8", "c8_enable_reshape_optim", "enable_transpose_kv_cache_by_block",
    "mix_placement", "msmonitor_use_daemon", "multistream_dsv4_dsa_overlap", "multistream_overlap_shared_expert",
    "recompute_scheduler_enable", "refresh",
)  # fmt: skip
_SIZES = ("oproj", "lmhead", "embedding", "mlp", "olora")
_CHUNKS = {
    "enabled": "bool",
    "smooth_factor": "float",
    "min_chunk": "int",
    "need_timing": "bool",
    "max_fit_chunk": "int",
}
#: Keys of --additional-config that AscendConfig has no typed field for: all of 0.23, which reads a plain dictionary
#: (ascend_config.py), and of 0.30 those that its maker takes out before it builds one (ascend_config.py:1846).
ADDITIONAL: dict[str, dict[str, Any]] = {
    VLLM_ASCEND_023.flags: {
        **dict.fromkeys(_SWITCHES, "bool"),
        **dict.fromkeys(
            ("multistream_overlap_gate", "enable_sleep_mode_extra_cleanup", "enable_matmul_allreduce",
             "enable_async_exponential", "dp_allreduce_on_npu", "enable_reduce_sample"), "bool",
        ),
        **dict.fromkeys(
            ("enable_fused_mc2", "enable_flashcomm2_parallel_size", "weight_nz_mode", "mega_moe_max_tokens",
             "SLO_limits_for_dynamic_batch"), "int",
        ),
        "dump_config_path": "str", "dump_config": "object", "ascend_log_path": "str", "layer_sharding": "list",
        "pa_shape_list": "list", "xlite_graph_config": {"enabled": "bool", "full_mode": "bool"},
        "ascend_compilation_config": "object", "ascend_fusion_config": "object",
        "finegrained_tp_config": {f"{part}_tensor_parallel_size": "int" for part in _SIZES},
        "eplb_config": {
            "dynamic_eplb": "bool", "expert_map_path": "str", "expert_heat_collection_interval": "int",
            "algorithm_execution_interval": "int", "expert_map_record_path": "str", "num_redundant_experts": "int",
            "eplb_policy_type": "int", "eplb_heat_collection_stage": ["all", "prefill", "decode"],
        },
        "weight_prefetch_config": {"enabled": "bool", "prefetch_ratio": "object"}, "profiling_chunk_config": _CHUNKS,
        "hamming_sparse": {"enabled": "bool", "sparse_json_location": "str"},
        "rejection_sampler_config": {
            "enable_block_verify": "bool", "enable_entropy_verify": "bool", "posterior_threshold": "float",
            "posterior_alpha": "float",
        },
    },
    VLLM_ASCEND_030.flags: {
        **dict.fromkeys(
            ("refresh", "enable_flashcomm1", "enable_kvpp", "enable_sparse_li_c4", "enable_sparse_sfa_turboquant",
             "enable_sp_by_pass", "enable_balance_scheduling", "recompute_scheduler_enable"), "bool",
        ),
        **dict.fromkeys(("gdn_prefill_backend", "kda_prefill_backend"), "str"),
        "scheduler_config": {
            "enable_balance_scheduling": "bool", "recompute_scheduler_enable": "bool",
            "profiling_chunk_config": _CHUNKS,
        },
        "sparse_kv_offload_config": "object", "kvpp_config": "object", "dump_config": "object",
        "xlite_graph_config": "object", "dynamic_spec_config": "object",
        "finegrained_tp_config": {f"{part}_tensor_parallel_size": "int" for part in _SIZES},
        "short_request_first_config": "object", "batch_job_sched_config": "object", "profiling_chunk_config": _CHUNKS,
    },
}  # fmt: skip


def table(name: str, python: Path) -> dict[str, Any]:
    """The table of the engine that an interpreter has."""
    content: dict[str, Any] = run_inside(
        RehearsalEnvironment(python), "flags", VLLM if name != SGLANG_05.flags else SGLANG
    )
    if name == SGLANG_05.flags:  # rule S3 names their replacements
        content["flags"] |= dict.fromkeys(OLD_SGLANG_FLAGS, "list")
    keys = content["flags"].get("additional-config")
    if name in ADDITIONAL:
        content["flags"]["additional-config"] = {**(keys if isinstance(keys, dict) else {}), **ADDITIONAL[name]}
    return content


def text(content: dict[str, Any]) -> str:
    """The file: one flag per line."""
    parts = []
    for key, value in content.items():
        rows = value.items() if isinstance(value, dict) else ()
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(kind)}" for name, kind in rows)
        parts.append(f"  {json.dumps(key)}: " + (f"{{\n{lines}\n  }}" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    name, python = sys.argv[1], Path(sys.argv[2]).absolute()
    tables = sorted(line.flags for line in LINES.values())
    if name not in tables:
        sys.exit(f"{name}: one of {', '.join(tables)}")
    path = data_dir("data/deploy/flags") / f"{name}.json"
    path.write_text(text(table(name, python)), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
