#!/usr/bin/env bash
# Before several deployments of a3-1m: pip install vllm-router. WORKERS="http://a:8000 http://b:8000", or, in
# Kubernetes, the flags of --service-discovery.
# A conversation stays with the server that has its cache, by header x-session-id; a dead server is left out after two
# failed heartbeats and taken back after one good one; a request it had not begun to answer goes to another. Retries
# must outlast the heartbeats: until a server counts as dead, its conversations are sent to it again.
# Clients' keys are passed on: the servers judge them.
set -euo pipefail
if [ "${1:-}" = --open ]; then OPEN=1; shift; fi
if [ -z "${VLLM_API_KEY:-}" ] && [ "${OPEN:-0}" != 1 ]; then
  echo "error: the router would answer anyone: set VLLM_API_KEY, or give --open first" >&2
  exit 2
fi
if [[ " $* " != *" --service-discovery "* ]]; then
  read -r -a workers <<< "${WORKERS:?URLs of the servers}"
  set -- --worker-urls "${workers[@]}" "$@"
fi
exec vllm-router \
  --host "${HOST:-0.0.0.0}" --port "${PORT:-8080}" \
  --policy consistent_hash \
  --health-check-interval-secs 2 --health-failure-threshold 2 --health-success-threshold 1 \
  --cb-failure-threshold 2 --cb-success-threshold 1 --cb-timeout-duration-secs 10 \
  --retry-max-retries 8 --retry-initial-backoff-ms 500 \
  --retry-backoff-multiplier 2 --retry-max-backoff-ms 5000 \
  --request-timeout-secs 3600 \
  "$@"
