"""Scripts that ask: do all servers of a machine answer and go on; are checkpoint and machine fit for a profile."""

from __future__ import annotations

from glm5_ascend.deploy.rendering.script_parts import CANN

#: Asks every server of the machine; a machine without one asks the first machine. Python without site-packages starts
#: at once, and http.client knows no proxy: a pod whose HTTP_PROXY is set would ask that for 127.0.0.1.
#: vLLM counts tokens when a prompt is through; meanwhile its parts show in the cache.
HEALTH = """\
#!/usr/bin/env bash
# HOST FIRST_PORT SERVERS SECONDS [STILL]: all of them answer within SECONDS. With STILL, none stands still so long
# either: of every engine that runs requests something changes, those of other machines included.
set -euo pipefail
exec python3 -IS - "$@" <<'PYTHON'
import http.client, json, os, re, sys, threading, time

host, first, count, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
still = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
STEPS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc")
BUSY = "vllm:num_requests_running"
SAMPLE = re.compile(r'^([\\w:]+)\\{[^}]*?engine="(\\w+)"[^}]*\\} (\\S+)$', re.MULTILINE)
ill = []


def answer(port, path):
    asked = http.client.HTTPConnection(host, port, timeout=limit)
    asked.request("GET", path)
    reply = asked.getresponse()
    text = reply.read().decode(errors="replace")
    if reply.status != 200:
        raise OSError(f"{path} has status {reply.status}")
    return text


def stands_still(port):
    counted = {}  # engine: [steps, requests]
    for name, engine, value in SAMPLE.findall(answer(port, "/metrics")):
        at = 0 if name in STEPS else 1 if name == BUSY else None
        if at is not None:
            counted.setdefault(engine, [0.0, 0.0])[at] += float(value)
    path, now, seen = f"/tmp/glm5-steps-{port}", time.monotonic(), {}
    if os.path.exists(path):
        with open(path) as file:
            seen = json.load(file)
    for engine, (steps, requests) in counted.items():
        if requests == 0 or engine not in seen or seen[engine][0] != steps:
            seen[engine] = [steps, now]
    with open(f"{path}.new", "w") as file:
        json.dump(seen, file)
    os.replace(f"{path}.new", path)
    return [each for each in counted if now - seen[each][1] > still]


def ask(port):
    try:
        answer(port, "/health")
        for engine in stands_still(port) if still else ():
            ill.append(f"port {port}: engine {engine} has requests and no step for {still:.0f} s")
    except (OSError, ValueError, http.client.HTTPException) as problem:
        ill.append(f"port {port}: {problem}")


threads = [threading.Thread(target=ask, args=(port,)) for port in range(first, first + count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("; ".join(ill) or 0)
PYTHON
"""
#: Before 400 GB load. torch, which `verify` reads files with, would load torch_npu, which wants a driver.
CHECKS = f"""\
#!/usr/bin/env bash
# MODEL PROFILE ROLE ENGINE [FLAG...]: the checkpoint by its recorded hashes and as ENGINE loads it; then the machine,
# and the profile with these flags, against the known bad combinations.
set -euo pipefail
{CANN}
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
model="$1" profile="$2" role="$3" engine="$4"
shift 4
glm5-ascend verify "$model" --quiet --engine "$engine"
exec glm5-ascend doctor "$model" --profile "$profile" --role "$role" -- "$@"
"""
#: compose's own: it only marks a container that does not answer.
COMPOSE_HEALTH = """\
#!/usr/bin/env bash
# FIRST_PORT SERVERS: all servers of this machine answer. compose marks a container that does not, and leaves it: after
# the first answer, ten misses in a row end its processes, and `restart` starts them again.
set -euo pipefail
misses="${STATE:-/dev/shm}/glm5-misses"  # in memory that a restart empties: misses while it loads do not count
if bash "$(dirname "$0")/health.sh" 127.0.0.1 "$1" "$2" 15; then
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
