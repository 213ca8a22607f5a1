"""Environment variables of vllm-ascend, HCCL and vLLM that a deployment sets: their names, and which are numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from glm5_ascend.engine_lines import VLLM_ASCEND_023, EngineLine

#: Read by int() in vllm-ascend 0.23 (envs.py); 0.30 reads true and false as well.
_SWITCHES = (
    "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE", "VLLM_ASCEND_ENABLE_FLASHCOMM1", "VLLM_ASCEND_ENABLE_MLAPO",
    "VLLM_ASCEND_BALANCE_SCHEDULING", "VLLM_ASCEND_FUSION_OP_TRANSPOSE_KV_CACHE_BY_BLOCK",
)  # fmt: skip
#: Whole numbers: vllm-ascend's envs.py, vLLM's envs.py, CANN's list of HCCL variables. Unit.
_NUMBERS = {
    "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE": "", "VLLM_ASCEND_ENABLE_NZ": "", "VLLM_ASCEND_ENABLE_FUSED_MC2": "",
    "HCCL_BUFFSIZE": "MB", "HCCL_CONNECT_TIMEOUT": "s", "HCCL_EXEC_TIMEOUT": "s", "HCCL_TRANSFER_TIMEOUT": "s",
    "HCCL_IF_BASE_PORT": "", "HCCL_RDMA_TC": "", "HCCL_RDMA_SL": "", "HCCL_RDMA_TIMEOUT": "",
    "HCCL_RDMA_RETRY_CNT": "", "HCCL_RDMA_QPS_PER_CONNECTION": "", "HCCL_INTRA_ROCE_ENABLE": "",
    "HCCL_INTRA_PCIE_ENABLE": "", "HCCL_WHITELIST_DISABLE": "", "HCCL_ENTRY_LOG_ENABLE": "",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "s", "VLLM_RPC_TIMEOUT": "ms", "VLLM_ENGINE_READY_TIMEOUT_S": "s",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "s", "OMP_NUM_THREADS": "", "TASK_QUEUE_ENABLE": "", "ACL_OP_INIT_MODE": "",
}  # fmt: skip
#: Least values by CANN's list.
_LEAST = {"HCCL_BUFFSIZE": 1, "HCCL_CONNECT_TIMEOUT": 120}
#: Other names that are documented.
_KNOWN = (
    "VLLM_ASCEND_ENABLE_BATCH_MEMCPY", "VLLM_ASCEND_KVPOOL_RANGE_DEBUG", "VLLM_ASCEND_ROPE_UB_SIZE_KB",
    "VLLM_ASCEND_LW_DEFER_LAST_SAVE", "VLLM_ASCEND_ACL_OP_INIT_MODE", "HCCL_SO_PATH", "HCCL_IF_IP",
    "HCCL_SOCKET_IFNAME", "HCCL_SOCKET_FAMILY", "HCCL_WHITELIST_FILE", "HCCL_ALGO", "HCCL_OP_EXPANSION_MODE",
    "HCCL_DETERMINISTIC", "HCCL_RDMA_PCIE_DIRECT_POST_NOSTRICT", "HCCL_RDMA_QP_PORT_CONFIG_PATH",
    "HCCL_MULTI_QP_THRESHOLD", "HCCL_OP_RETRY_ENABLE", "HCCL_OP_RETRY_PARAMS", "HCCL_DIAGNOSE_ENABLE",
    "HCCL_DEBUG_CONFIG", "HCCL_LOGIC_SUPERPOD_ID", "HCCL_CONCURRENT_ENABLE", "HCCL_HOST_SOCKET_PORT_RANGE",
    "HCCL_NPU_SOCKET_PORT_RANGE", "HCCL_NPU_NET_PROTOCOL", "HCCL_DFS_CONFIG", "HCCL_TEST_USE_DEVS",
)  # fmt: skip
_PREFIXES = ("VLLM_ASCEND_", "HCCL_")
ON = ("1", "true")


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Names that begin as vllm-ascend's or HCCL's and that neither documents; with the name that is meant."""
    documented = (*_SWITCHES, *_NUMBERS, *_KNOWN)
    for name in sorted(environ):
        if name.startswith(_PREFIXES) and name not in documented:
            close = difflib.get_close_matches(name, documented, n=1, cutoff=0.8)
            yield f"{name} (meant: {close[0]}?)" if close else name


def bad_variables(environ: Mapping[str, str], line: EngineLine) -> Iterator[str]:
    """`NAME=value: what is expected` for each value that the engine line cannot read. `{words}` of a profile pass."""
    for name, unit in (*_NUMBERS.items(), *dict.fromkeys(_SWITCHES, "").items()):
        text = environ.get(name, "").strip()
        words = ("true", "false") if name in _SWITCHES and line is not VLLM_ASCEND_023 else ()
        least = _LEAST.get(name, 0)
        good = (text.isdecimal() and int(text) >= least) or text.lower() in words or "{" in text
        if text and not good:
            expected = "0 or 1" if name in _SWITCHES else f"a whole number{f' ({unit})' if unit else ''}"
            yield f"{name}={text}: expected {expected}" + (f", at least {least}" if least else "")


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    """A variable as a number; true is 1. The default for an absent one and for one that is no number."""
    text = environ.get(name, "").strip()
    if text.lower() in ("true", "false"):
        return int(text.lower() in ON)
    return int(text) if text.isdecimal() else default
