#!/usr/bin/env bash
# a3-1m: one Atlas 800T A3, GLM-5.2 W4A8 with int8 indexer keys (C8), up to 1,024,000 tokens
# for vllm-ascend-0.23.0; accepted by the real parser and configuration code of its version; not run on an NPU
# source: docs GLM5.2.md of vllm-ascend main (1M, one A3, TP16 DCP16), with what 0.23.0 asks for in addition (FlashComm for enable_dsa_cp). 0.23.0's own 1M recipe combines DCP with SFA-C8, which its release notes advise against (#14011)
# on vllm-ascend main: enable_flashcomm1 does nothing but warn; enable_dsa_cp no longer needs it
# role: server; flags given to this script go to vLLM and win
set -euo pipefail
MODEL="${MODEL:-/models/glm5}"
# What images set for terminals alone: CANN, ATB, Triton's compiler, Mooncake's libraries (vllm-ascend #9141, #12059).
cann() {
  local file home="${CANN:-/usr/local/Ascend}"
  local compiler=share/info/ascendnpu-ir/bin/set_env.sh
  set +eu
  for file in "$home"/ascend-toolkit/set_env.sh "$home"/cann-*/"$compiler" "$home"/nnal/atb/set_env.sh; do
    # shellcheck disable=SC1090
    if [ -r "$file" ]; then . "$file"; fi
  done
  set -eu
  export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/lib"
}
cann
if [ "${1:-}" = --open ]; then OPEN=1; shift; fi
if [ -z "${VLLM_API_KEY:-}" ] && [ "${OPEN:-0}" != 1 ]; then
  echo "error: vLLM on 0.0.0.0 would answer anyone: set VLLM_API_KEY, or give --open first" >&2
  exit 2
fi
if [ -n "${VLLM_API_KEY:-}" ]; then set -- --middleware glm5_ascend.serve.api_key.EveryRouteWantsTheKey "$@"; fi
export HCCL_OP_EXPANSION_MODE="${HCCL_OP_EXPANSION_MODE:-AIV}"
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
export OMP_PROC_BIND="${OMP_PROC_BIND:-false}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-20}"
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-768}"
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"
export VLLM_WORKER_MULTIPROC_METHOD="${VLLM_WORKER_MULTIPROC_METHOD:-spawn}"
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}"
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"
export HCCL_TRANSFER_TIMEOUT="${HCCL_TRANSFER_TIMEOUT:-600}"
export VLLM_ENGINE_READY_TIMEOUT_S="${VLLM_ENGINE_READY_TIMEOUT_S:-10000}"
export VLLM_RPC_TIMEOUT="${VLLM_RPC_TIMEOUT:-3600000}"
export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="${VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS:-30000}"
PORT="${PORT:-8000}"
exec vllm serve "${MODEL}" \
  --host 0.0.0.0 \
  --port "${PORT}" \
  --shutdown-timeout 300 \
  --served-model-name glm-5 \
  --quantization ascend \
  --enable-expert-parallel \
  --seed 1024 \
  --tool-call-parser glm47 \
  --reasoning-parser glm45 \
  --enable-auto-tool-choice \
  --chat-template-content-format string \
  --enable-chunked-prefill \
  --no-enable-prefix-caching \
  --async-scheduling \
  --compilation-config "{\"cudagraph_mode\": \"FULL_DECODE_ONLY\", \"cudagraph_capture_sizes\": [4, 16, 128]}" \
  --speculative-config "{\"method\": \"deepseek_mtp\", \"num_speculative_tokens\": 3, \"enforce_eager\": true}" \
  --additional-config "{\"multistream_overlap_shared_expert\": true, \"enable_dsa_cp\": true, \"enable_flashcomm1\": true, \"enable_sparse_li_c8\": true, \"enable_cpu_binding\": true, \"ascend_compilation_config\": {\"enable_npugraph_ex\": true}}" \
  --tensor-parallel-size 16 \
  --decode-context-parallel-size 16 \
  --cp-kv-cache-interleave-size 128 \
  --max-num-seqs 32 \
  --max-model-len 1024000 \
  --max-num-batched-tokens 16384 \
  --gpu-memory-utilization 0.8 \
  --safetensors-load-strategy prefetch \
  "$@"
