"""Parts of the servers' scripts: API key, network interface, environment of the image, termination."""

from __future__ import annotations

from glm5_ascend.serve.flags import KEY_VARIABLE
from glm5_ascend.serve.launch import GUARDS

#: Prints the interface of the route to the first machine. /proc and `ip` differ between images.
NIC_FINDER = """\
nic_towards() {
  python3 - "$1" "${LWS_LEADER_ADDRESS:+120}" <<'PYTHON'
import fcntl, socket, struct, sys, time
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
patience = time.monotonic() + float(sys.argv[2] or 0)  # the name of a pod resolves some seconds after its start
while True:
    try:
        probe.connect((socket.gethostbyname(sys.argv[1]), 9))  # sends nothing
        break
    except OSError as problem:
        if not isinstance(problem, socket.gaierror) or time.monotonic() > patience:
            sys.exit(f"error: HEAD={sys.argv[1]}: {problem}")
        time.sleep(2)
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


#: Images set these in ~/.bashrc and an entry point, which are not read without a terminal.
CANN = """\
# Images set this for terminals only: CANN, ATB, Triton's compiler, Mooncake's libraries, jemalloc (vllm-ascend #9141,
# #12059, its Dockerfiles).
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
  file="${JEMALLOC:-/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2}"
  if [ -r "$file" ]; then export LD_PRELOAD="$file${LD_PRELOAD:+:$LD_PRELOAD}"; fi
}
cann"""

#: The proxy and the router connect to servers directly.
NO_PROXY = "unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY"


def key_check(listens: str, *, middleware: bool = False, sglang: bool = False) -> list[str]:
    """Lines that refuse to start without a key on a reachable address, unless OPEN=1 or --open is given.

    Args:
        listens: name of the program, for the message.
        middleware: with a key, start vLLM with `GUARDS`: the key for every route, not only those below /v1.
        sglang: pass the key as a flag.
    """
    lines = [
        'if [ "${1:-}" = --open ]; then OPEN=1; shift; fi',
        f'if [ -z "${{{KEY_VARIABLE}:-}}" ] && [ "${{OPEN:-0}}" != 1 ]; then',
        f'  echo "error: {listens} would answer anyone: set {KEY_VARIABLE}, or give --open first" >&2',
        "  exit 2",
        "fi",
    ]
    if middleware:
        lines += [f'if [ -n "${{{KEY_VARIABLE}:-}}" ]; then', f'  set -- {" ".join(GUARDS)} "$@"', "fi"]
    if sglang:
        lines.append(f'if [ -n "${{{KEY_VARIABLE}:-}}" ]; then set -- --api-key "${KEY_VARIABLE}" "$@"; fi')
    return lines


#: Lines before the start of the servers. On SIGTERM each server finishes its requests. `wait` returns at a signal.
STOP = """\
stop() {
  mapfile -t running < <(jobs -pr)
  if [ "${#running[@]}" -gt 0 ]; then kill -TERM "${running[@]}" 2>/dev/null || true; fi
}
trap 'told=1; stop' TERM INT"""
#: Lines after the start: when one server ends, the script ends the others and waits for them; it may be process 1.
DRAIN = """\
status=0
wait -n || status=$?
trap '' TERM INT
stop
while [ -n "$(jobs -pr)" ]; do wait || true; done
if [ "${told:-0}" = 1 ]; then exit 0; fi
exit "$status"\
"""
