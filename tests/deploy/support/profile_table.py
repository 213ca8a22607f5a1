"""The table of profiles in deploy/README.md: `python -m tests.deploy.support.profile_table` writes it."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.deploy.profiles.file import SwitchKeys
from glm5_ascend.deploy.profiles.load import Profile, Role, load, names
from glm5_ascend.engine_lines import SGLANG, VLLM_ASCEND_030

README = Path(__file__).parents[3] / "deploy/README.md"
HEAD = "| profile | weights | TP / DP / DCP | tokens | on | accepted by |\n|---|---|---|---|---|---|\n"


def is_on(switch: SwitchKeys, role: Role) -> bool:
    return switch.on if isinstance(switch.on, bool) else role.name in switch.on


def row(profile: Profile, role: Role) -> str:
    args = role.args
    name = profile.name if len(profile.roles) == 1 else f"{profile.name}, {role.name}"
    machine = profile.hardware["node"]
    if profile.engine == SGLANG:
        layout, tokens = f"{args['tp-size']} / {args.get('dp-size', 1)} / 1", args["context-length"]
        accepted = "SGLang 0.5.23"
    else:
        layout = " / ".join(str(args.get(f"{axis}-parallel-size", 1)) for axis in ("tensor", "data", "decode-context"))
        tokens = args.get("max-model-len", "by the memory")
        accepted = "vllm-ascend 0.23.0, vLLM 0.32" if profile.platform == "npu" else f"vLLM 0.32, {profile.status}"
        if profile.line is VLLM_ASCEND_030:
            accepted = "weights: loader of vllm-ascend 0.30.0rc2"
    on = ", ".join(key.replace("_", " ") for key, switch in profile.scheduling.items() if is_on(switch, role))
    cells = [
        f"{name} ({role.nodes} x {machine})",
        profile.weights["recipe"],
        layout,
        f"{tokens:,}" if isinstance(tokens, int) else tokens,
        on,
        accepted,
    ]
    return f"| {' | '.join(cells)} |\n"


def table() -> str:
    return HEAD + "".join(row(profile, role) for profile in map(load, names()) for role in profile.roles.values())


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    start = text.index(HEAD)
    end = text.index("\n\n", start) + 1
    README.write_text(text[:start] + table() + text[end:], encoding="utf-8")
