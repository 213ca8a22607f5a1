"""Scripts that check the servers of a machine, and checkpoint and machine before a server starts."""

from __future__ import annotations

from glm5_ascend.deploy.rendering.script_parts import CANN

#: Asks every server of the machine; a machine without servers asks the first machine. Python without site-packages
#: starts quickly, and http.client ignores HTTP_PROXY. vLLM counts the tokens of a prompt at its end; until then
#: the use of the cache grows.
HEALTH = """\
#!/usr/bin/env bash
# HOST FIRST_PORT SERVERS SECONDS [STILL]: checks that all servers answer within SECONDS. With STILL, every engine that
# runs requests must make progress within STILL seconds, also engines on other machines.
set -euo pipefail
exec python3 -IS - "$@" <<'PYTHON'
import http.client, json, os, re, sys, threading, time

host, first, count, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
still = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
STEPS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc")
BUSY = "vllm:num_requests_running"
SAMPLE = re.compile(r'^([\\w:]+)\\{[^}]*?engine="(\\w+)"[^}]*\\} (\\S+)$', re.MULTILINE)
errors = []


def answer(port, path):
    connection = http.client.HTTPConnection(host, port, timeout=limit)
    connection.request("GET", path)
    reply = connection.getresponse()
    text = reply.read().decode(errors="replace")
    if reply.status != 200:
        raise OSError(f"{path} has status {reply.status}")
    return text


def stuck_engines(port):
    counted = {}  # engine: [steps, requests]
    for name, engine, value in SAMPLE.findall(answer(port, "/metrics")):
        index = 0 if name in STEPS else 1 if name == BUSY else None
        if index is not None:
            counted.setdefault(engine, [0.0, 0.0])[index] += float(value)
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
    return [engine for engine in counted if now - seen[engine][1] > still]


def ask(port):
    try:
        answer(port, "/health")
        for engine in stuck_engines(port) if still else ():
            errors.append(f"port {port}: engine {engine} has requests and made no step for {still:.0f} s")
    except (OSError, ValueError, http.client.HTTPException) as problem:
        errors.append(f"port {port}: {problem}")


threads = [threading.Thread(target=ask, args=(port,)) for port in range(first, first + count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("; ".join(errors) or 0)
PYTHON
"""
#: Runs before 400 GB are loaded. `verify` imports torch, which would load torch_npu, which needs a driver.
CHECKS = f"""\
#!/usr/bin/env bash
# MODEL PROFILE ROLE ENGINE [FLAG...]: checks the hashes of the checkpoint and that ENGINE loads it; then the machine
# and the profile with these flags for known bad combinations.
set -euo pipefail
{CANN}
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
model="$1" profile="$2" role="$3" engine="$4"
shift 4
glm5-ascend verify "$model" --engine "$engine"
exec glm5-ascend doctor "$model" --profile "$profile" --role "$role" -- "$@"
"""
