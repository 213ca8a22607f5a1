"""The table of profiles in deploy/README.md: `python -m tests.deploy.support.profile_table` prints it."""

from __future__ import annotations

from glm5_ascend.deploy.profiles.engines import SGLANG
from glm5_ascend.deploy.profiles.load import Profile, Role, SchedulingSwitch, load, names

HEAD = (
    "| profile | weights | TP / DP / DCP | tokens | on | accepted by |\n"
    "|---|---|---|---|---|---|\n"
)  # fmt: skip


def is_on(switch: SchedulingSwitch, role: Role) -> bool:
    return switch.on if isinstance(switch.on, bool) else role.name in switch.on


def row(profile: Profile, role: Role) -> str:
    args = role.args
    name = profile.name if len(profile.roles) == 1 else f"{profile.name}, {role.name}"
    machines = f"{role.nodes} x {role.name if profile.alternatives else profile.hardware['node']}"
    weights = profile.weights["recipe"]
    if profile.engine == SGLANG:
        return _of_sglang(profile, role, name, machines)
    layout = " / ".join(str(args.get(f"{kind}-parallel-size", 1)) for kind in ("tensor", "data", "decode-context"))
    on = ", ".join(key.replace("_", " ") for key, switch in profile.scheduling.items() if is_on(switch, role))
    accepted = "vllm-ascend 0.23.0, vLLM 0.32" if profile.platform == "npu" else "vLLM 0.32, runs in CI"
    return f"| {name} ({machines}) | {weights} | {layout} | {args['max-model-len']:,} | {on} | {accepted} |\n"


def _of_sglang(profile: Profile, role: Role, name: str, machines: str) -> str:
    layout = f"{role.args['tp-size']} / {role.args.get('dp-size', 1)} / 1"
    on = ", ".join(key.replace("_", " ") for key, switch in profile.scheduling.items() if is_on(switch, role))
    tokens = f"{role.args['context-length']:,}"
    return f"| {name} ({machines}) | {profile.weights['recipe']} | {layout} | {tokens} | {on} | SGLang 0.5.23 |\n"


def table() -> str:
    return HEAD + "".join(row(profile, role) for profile in map(load, names()) for role in profile.roles.values())


if __name__ == "__main__":
    print(table(), end="")
