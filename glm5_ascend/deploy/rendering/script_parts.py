"""Parts of the servers' scripts: who may ask, which interface, how requests in flight end."""

from __future__ import annotations

KEY_VARIABLE = "VLLM_API_KEY"
#: Finds this machine's interface on the way to the first machine; /proc and `ip` differ between images.
NIC_FINDER = """\
nic_towards() {
  python3 - "$1" <<'PYTHON'
import fcntl, socket, struct, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    probe.connect((sys.argv[1], 9))  # sends nothing
except OSError as problem:
    sys.exit(f"error: HEAD={sys.argv[1]}: {problem}")
for _, name in socket.if_nameindex():
    try:
        asked = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
    except OSError:
        continue
    if socket.inet_ntoa(asked[20:24]) == probe.getsockname()[0]:
        print(name)
        break
PYTHON
}"""


#: The images set these in ~/.bashrc and in an entry point; a server that is started without a terminal reads neither.
CANN = """\
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
cann"""


def key_check(listens: str, *, middleware: bool = False, sglang: bool = False) -> list[str]:
    """Lines that refuse to start without a key where others reach the address. OPEN=1 or --open says it is meant.

    Args:
        listens: what listens, for the message.
        middleware: every route of vLLM wants the key, not those below /v1 alone.
        sglang: takes the key as a flag alone.
    """
    lines = [
        'if [ "${1:-}" = --open ]; then OPEN=1; shift; fi',
        f'if [ -z "${{{KEY_VARIABLE}:-}}" ] && [ "${{OPEN:-0}}" != 1 ]; then',
        f'  echo "error: {listens} would answer anyone: set {KEY_VARIABLE}, or give --open first" >&2',
        "  exit 2",
        "fi",
    ]
    if middleware:
        guard = "glm5_ascend.serve.api_key.EveryRouteWantsTheKey"
        lines.append(f'if [ -n "${{{KEY_VARIABLE}:-}}" ]; then set -- --middleware {guard} "$@"; fi')
    if sglang:
        lines.append(f'if [ -n "${{{KEY_VARIABLE}:-}}" ]; then set -- --api-key "${KEY_VARIABLE}" "$@"; fi')
    return lines


#: Stands before the servers' start. Told to stop, each server finishes what it has begun. `wait` returns at a signal.
STOP = """\
stop() {
  mapfile -t running < <(jobs -pr)
  if [ "${#running[@]}" -gt 0 ]; then kill -TERM "${running[@]}" 2>/dev/null || true; fi
}
trap 'told=1; stop' TERM INT"""
#: Stands behind it: when one server ends, so do the others, and the script, which may be process 1, waits for them all.
DRAIN = """\
status=0
wait -n || status=$?
trap '' TERM INT
stop
while [ -n "$(jobs -pr)" ]; do wait || true; done
if [ "${told:-0}" = 1 ]; then exit 0; fi
exit "$status"\
"""
#: Asks every server of the machine; a machine without one asks the first machine.
HEALTH = """\
#!/usr/bin/env bash
# HOST FIRST_PORT SERVERS SECONDS: all of them answer.
set -euo pipefail
for port in $(seq "$2" $(($2 + $3 - 1))); do
  python3 - "http://$1:$port/health" "$4" <<'PYTHON'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2]))
PYTHON
done
"""
#: compose's own: it only marks a container that does not answer.
COMPOSE_HEALTH = """\
#!/usr/bin/env bash
# FIRST_PORT SERVERS: all servers of this machine answer. compose marks a container that does not, and leaves it: after
# the first answer, ten misses in a row end its processes, and `restart` starts them again.
set -euo pipefail
misses="${STATE:-/dev/shm}/glm5-misses"  # in memory that a restart empties: misses while it loads do not count
if bash "$(dirname "$0")/health.sh" 127.0.0.1 "$1" "$2" 5; then
  echo 0 > "$misses"
  exit 0
fi
if [ -f "$misses" ]; then
  count=$(($(cat "$misses") + 1))
  echo "$count" > "$misses"
  if [ "$count" -ge 10 ]; then kill -s KILL -- -1; fi  # all but process 1, docker's own by `init: true`
fi
exit 1
"""
