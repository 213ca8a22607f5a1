"""The facts that rules speak of, and those that a command line holds.

Those of a machine come from `diagnosis.machine`, those of a checkpoint from `diagnosis.weights`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.engine_lines import VLLM_ASCEND_LINES
from glm5_ascend.serve.flags import given_flags, json_of, value_of

#: Every fact, and what it is.
FACTS = {
    "npu": "the profile is for an Atlas", "engine": "vllm or sglang",
    "node": "a2 or a3", "nodes": "machines of the role", "dies": "dies per machine that the profile uses",
    "weights_gib": "weights per die, GiB",
    "transformers": "version", "vllm_ascend": "version", "cann": "version",
    "triton": "Triton-Ascend is installed", "wanted_triton": "its version in the profile's set",
    "our_plugin": "vLLM would load this package's plugin, which finds the rotation it mends",
    "device_count": "NPUs visible here", "hbm_gib": "HBM per die, GiB", "shm_gib": "size of /dev/shm, GiB",
    "memlock_unlimited": "ulimit -l is unlimited", "open_files": "ulimit -n",
    "launch_blocking": "ASCEND_LAUNCH_BLOCKING=1",
    "network_mount": "the checkpoint lies on a network file system",
    "quantized": "the checkpoint has a description", "model": "name of its directory",
    "weights": "w4a8 or w8a8, by the experts", "experts": "type of routed experts",
    "attention": "type of q_a, kv_a, q_b",
    "linear_types": "types of all other linears", "kv_b_quantized": "kv_b_proj is not FLOAT",
    "group_size": "of the description, None if absent",
    "shared_indexers": "config.json has indexer_types with shared layers",
    "layers_without_indexer": "layers whose indexer is in no shard",
    "mtp_layers": "of config.json", "mtp_tensors": "tensors of the MTP layer in the index",
    "tp": "", "dp": "", "pcp": "", "dcp": "", "ep": "expert parallelism", "ep_size": "its ranks",
    "interleave": "cp-kv-cache-interleave-size", "block_size": "",
    "max_model_len": "", "max_num_seqs": "", "max_num_batched_tokens": "",
    "prefix_cache": "", "chunked_prefill": "", "graph": "cudagraph_mode, NONE if eager",
    "capture_sizes": "given ones", "capture_multiple_of_tp": "one of them is",
    "mtp": "draft tokens, 0 if off", "mtp_eager": "",
    "draft_inherits": "SGLang: --quantization, and no --speculative-draft-model-quantization",
    "old_flag": "SGLang: a flag that 0.5.23 no longer knows",
    "kv_role": "none, kv_producer, kv_consumer or kv_both", "pd": "prefill and decode apart",
    "pd_sizes_match": "", "dcp_prefill": "", "dcp_decode": "",
    "flashcomm1": "", "enable_dsa_cp": "", "fused_mc2": "", "multistream_overlap": "", "balance": "",
    "enable_mlapo": "asked for by name", "mlapo_active": "asked for or left on", "sfa_c8": "", "li_c8": "", "kv_nz": "",
    "reduce_sample": "", "recompute": "", "mc2_hierarchy": "",
    "hccl_intra": "HCCL_INTRA_ROCE_ENABLE=0 and HCCL_INTRA_PCIE_ENABLE=1", "dynamic_eplb": "", "profiling_chunk": "",
    "kv_offload_sparse": "", "lmhead_tp": "", "oproj_tp": "", "embedding_tp": "",
    "unknown_keys": "keys of --additional-config that the newest line refuses",
    "old_c8_keys": "C8 by --additional-config",
    "new_c8_flags": "C8 by --kv-cache-dtype or --attention_config", "hccl_buffer": "HCCL_BUFFSIZE, MB",
    "exchange_buffer": "what dispatch and combine need of it, MB",
}  # fmt: skip
#: Of every GLM-5: routed experts, those of a token, width.
EXPERTS, CHOSEN, HIDDEN = 256, 8, 6144
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
_NUMBERS = {
    "tp": ("--tensor-parallel-size", 1), "dp": ("--data-parallel-size", 1),
    "pcp": ("--prefill-context-parallel-size", 1), "dcp": ("--decode-context-parallel-size", 1),
    "interleave": ("--cp-kv-cache-interleave-size", 1), "block_size": ("--block-size", 128),
    "max_model_len": ("--max-model-len", None), "max_num_seqs": ("--max-num-seqs", None),
    "max_num_batched_tokens": ("--max-num-batched-tokens", None),
}  # fmt: skip


def of_profile(profile: Profile, role: Role) -> dict[str, Any]:
    """What the profile says beside its flags; of the checkpoint, what it should be."""
    hardware = profile.hardware
    facts: dict[str, Any] = {
        "npu": profile.platform == "npu",
        "node": role.name if profile.alternatives else hardware["node"],
        "nodes": role.nodes,
        "dies": role.local_ranks * role.rank_dies,
    }
    facts |= {part: kind for part, kind in profile.weights.items() if part in ("experts", "attention")}
    facts |= {"quantized": facts["npu"], "weights": short_name(profile.weights["experts"])}
    if "weights_gib" in profile.memory:
        facts["weights_gib"] = profile.memory["weights_gib"]
    sides = {side: profile.roles.get(side) for side in ("prefill", "decode")}
    if all(sides.values()):
        for side, other in sides.items():
            facts[f"dcp_{side}"] = other.args.get("decode-context-parallel-size", 1) if other else 1
    return facts


def short_name(experts: str) -> str:
    """What the recipe of such experts is called."""
    return {"W4A8_DYNAMIC": "w4a8", "W8A8_DYNAMIC": "w8a8"}.get(experts, "float")


def of_command(argv: list[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """What a `vllm serve` command line and its environment say; later flags win."""
    given = given_flags(argv)
    facts: dict[str, Any] = {"engine": "vllm", "draft_inherits": False, "old_flag": ""}
    facts |= {
        name: number
        for name, (flag, default) in _NUMBERS.items()
        if (number := _number(value_of(argv, flag), default)) is not None
    }
    facts["ep"] = "--enable-expert-parallel" in argv
    facts["ep_size"] = facts["tp"] * facts["dp"] if facts["ep"] else 1
    facts["prefix_cache"] = "--no-enable-prefix-caching" not in argv
    facts["chunked_prefill"] = "--no-enable-chunked-prefill" not in argv
    graph = json_of(argv, "--compilation-config")
    facts["graph"] = "NONE" if "--enforce-eager" in given else graph.get("cudagraph_mode", "FULL_AND_PIECEWISE")
    sizes = graph.get("cudagraph_capture_sizes") or []
    facts["capture_sizes"] = len(sizes)
    facts["capture_multiple_of_tp"] = any(size % facts["tp"] == 0 for size in sizes)
    draft = json_of(argv, "--speculative-config")
    facts["mtp"] = draft.get("num_speculative_tokens", 0) if "mtp" in str(draft.get("method")) else 0
    facts["mtp_eager"] = draft.get("enforce_eager", False)
    facts |= _of_transfer(json_of(argv, "--kv-transfer-config"), facts)
    additional = json_of(argv, "--additional-config")
    facts |= _of_additional(additional, environ) | _of_caches(argv, additional)
    facts["unknown_keys"] = ", ".join(sorted(set(additional) - (VLLM_ASCEND_LINES[-1].config_keys or set(additional))))
    facts["hccl_buffer"] = _number(environ.get("HCCL_BUFFSIZE", ""), 200)
    if "max_num_seqs" in facts:
        facts["exchange_buffer"] = exchange_buffer(facts)
    facts["launch_blocking"] = environ.get("ASCEND_LAUNCH_BLOCKING", "0") == "1"
    return facts


def _of_transfer(transfer: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    role = transfer.get("kv_role", "none")
    apart = role in (PRODUCER, CONSUMER)
    found = {"kv_role": role, "pd": apart}
    if not apart:
        return found | {"pd_sizes_match": True, "dcp_prefill": 1, "dcp_decode": 1}
    side = "prefill" if role == PRODUCER else "decode"
    sizes = transfer.get("kv_connector_extra_config", {}).get(side, {})
    match = (sizes.get("tp_size"), sizes.get("dp_size")) == (facts["tp"], facts["dp"])
    return found | {"pd_sizes_match": match, f"dcp_{side}": facts["dcp"]}


def _of_additional(additional: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """A key wins over the variable of old, as in vllm-ascend's AscendConfig."""

    def old(key: str, variable: str, default: int = 0) -> int:
        return int(additional[key]) if key in additional else _number(environ.get(variable, ""), default) or 0

    parts = additional.get("finegrained_tp_config", {})
    return {
        "flashcomm1": bool(old("enable_flashcomm1", "VLLM_ASCEND_ENABLE_FLASHCOMM1")),
        "balance": bool(old("enable_balance_scheduling", "VLLM_ASCEND_BALANCE_SCHEDULING")),
        "fused_mc2": old("enable_fused_mc2", "VLLM_ASCEND_ENABLE_FUSED_MC2"),
        "mlapo_active": bool(old("enable_mlapo", "VLLM_ASCEND_ENABLE_MLAPO", 1)),
        "enable_mlapo": bool(old("enable_mlapo", "VLLM_ASCEND_ENABLE_MLAPO")),
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


def _of_caches(argv: list[str], additional: dict[str, Any]) -> dict[str, Any]:
    """INT8 caches, in both spellings."""
    flags = value_of(argv, "--kv-cache-dtype") == "int8"
    indexer = json_of(argv, "--attention-config").get("indexer_kv_dtype", "")
    indexer = value_of(argv, "--attention-config.indexer-kv-dtype") or indexer
    old = [bool(additional.get(f"enable_sparse_{part}_c8")) for part in ("sfa", "li")]
    return {
        "sfa_c8": old[0] or flags, "li_c8": old[1] or indexer == "int8",
        "old_c8_keys": any(old), "new_c8_flags": flags or indexer == "int8",
    }  # fmt: skip


def exchange_buffer(facts: Mapping[str, Any]) -> int:
    """HCCL_BUFFSIZE in MB that dispatch and combine of a decode step of GLM-5 need: CANN's formula, two buffers."""
    if not facts["ep"] or facts["ep_size"] == 1:
        return 0
    tokens = min(512, -(-facts["max_num_seqs"] * (facts["mtp"] + 1) // facts["tp"]))
    local = EXPERTS // facts["ep_size"]
    sent = 512 * -(-(2 * HIDDEN + 64) // 512)
    received = (CHOSEN + 1) * tokens * 2 * HIDDEN
    return int(-(-2 * (local * tokens * facts["ep_size"] * sent + received) // 2**20))


def _number(text: str, default: int | None) -> int | None:
    return int(text) if re.fullmatch(r"-?\d+", text) else default
