#!/usr/bin/env bash
# HOST FIRST_PORT SERVERS SECONDS: all of them answer.
set -euo pipefail
for port in $(seq "$2" $(($2 + $3 - 1))); do
  python3 - "http://$1:$port/health" "$4" <<'PYTHON'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2]))
PYTHON
done
