#!/usr/bin/env bash
# Starts a shell in vllm-ascend's container with this machine's NPUs, this clone and a folder of models.
set -euo pipefail

image=quay.io/ascend/vllm-ascend:v0.23.0-a3    # the stable line of glm5_ascend/engine_lines.py
models=/models
dry_run=false
usage="usage: $0 [--image IMAGE] [--models FOLDER] [--dry-run] [COMMAND...]
  --image IMAGE     container image (default: $image; Atlas A2: ${image%-a3})
  --models FOLDER   folder of models, mounted at the same path (default: $models)
  --dry-run         print the docker command instead of running it
  COMMAND           what the container runs (default: bash)"

fail() {
  echo "error: $1" >&2
  exit "$2"
}

while [ $# -gt 0 ]; do
  case "$1" in
    --image | --models)
      [ $# -ge 2 ] || fail "$1 needs a value" 2
      if [ "$1" = --image ]; then image=$2; else models=$2; fi
      shift 2
      ;;
    --dry-run) dry_run=true; shift ;;
    -h | --help) echo "$usage"; exit 0 ;;
    -*) fail "$1: unknown option; see $0 --help" 2 ;;
    *) break ;;
  esac
done
case "$models" in
  /*) ;;
  *) fail "--models $models: not an absolute path" 2 ;;
esac
[ $# -gt 0 ] || set -- bash

clone=$(cd "$(dirname "$0")/.." && pwd)
run=(docker run -it --network host --shm-size 512g --ulimit memlock=-1)
run+=(-v "$models:$models" -v "$clone:/glm5-ascend" -w /glm5-ascend)
npus=()
for device in /dev/davinci[0-9]*; do
  if [ -e "$device" ]; then npus+=("$device"); fi
done
if [ ${#npus[@]} -eq 0 ]; then
  $dry_run || fail "no NPU on this machine (/dev/davinci0); --dry-run prints the command for an Atlas A3" 3
  for die in {0..15}; do npus+=("/dev/davinci$die"); done
fi
for device in "${npus[@]}" /dev/davinci_manager /dev/devmm_svm /dev/hisi_hdc; do run+=(--device "$device"); done
for path in /usr/local/dcmi /usr/local/bin/npu-smi /usr/local/Ascend/driver/{lib64,version.info,tools/hccn_tool} \
  /etc/ascend_install.info /etc/hccn.conf; do
  run+=(-v "$path:$path:ro")
done
run+=("$image" "$@")

if $dry_run; then
  printf '%q ' "${run[@]}"
  echo
else
  exec "${run[@]}"
fi
