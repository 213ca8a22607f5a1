"""The table of profiles in deploy/README.md.

    python -m tests.deploy.support.profile_table [ANSWER.json ...]      # writes it

ANSWER: what `glm5-ascend rehearse ... --json` printed of ranks that are all good; kept in `rehearsed.json` here.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role, SchedulingSwitch, load, names
from glm5_ascend.engine_lines import SGLANG

README = Path(__file__).parents[3] / "deploy/README.md"
REHEARSED = Path(__file__).with_name("rehearsed.json")
HEAD = (
    "| profile | weights | TP / DP / DCP | tokens | on | accepted by | rehearsed |\n"
    "|---|---|---|---|---|---|---|\n"
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
    ends = f"{accepted} | {rehearsed(profile, role)}"
    return f"| {name} ({machines}) | {weights} | {layout} | {args['max-model-len']:,} | {on} | {ends} |\n"


def rehearsed(profile: Profile, role: Role) -> str:
    """Versions, ranks and date of the last rehearsals that found nothing; alike ones in one piece."""
    alike: dict[str, list[str]] = {}
    for version, last in sorted(json.loads(REHEARSED.read_text()).get(f"{profile.name}, {role.name}", {}).items()):
        alike.setdefault(f"ranks {last['ranks']}, {last['layers']} layers, {last['date']}", []).append(version)
    return "; ".join(f"{' and '.join(versions)}: {what}" for what, versions in alike.items()) or "-"


def keep(answer: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Take over every role of an answer; one with problems loses what was known of it in this version."""
    version = answer["versions"]["vllm-ascend"]
    for name in dict.fromkeys(rank["role"] for rank in answer["ranks"]):
        ranks, key = [rank for rank in answer["ranks"] if rank["role"] == name], f"{answer['profile']}, {name}"
        recorded.setdefault(key, {}).pop(version, None)
        if not any(rank["problems"] for rank in ranks):
            recorded[key][version] = {
                "ranks": ", ".join(str(rank["rank"]) for rank in ranks) + f" of {ranks[0]['world']}",
                "layers": max(rank["found"]["cache"]["layers"] for rank in ranks),
                "date": datetime.now(UTC).date().isoformat(),
            }
        if not recorded[key]:
            del recorded[key]


def _of_sglang(profile: Profile, role: Role, name: str, machines: str) -> str:
    layout = f"{role.args['tp-size']} / {role.args.get('dp-size', 1)} / 1"
    on = ", ".join(key.replace("_", " ") for key, switch in profile.scheduling.items() if is_on(switch, role))
    tokens = f"{role.args['context-length']:,}"
    return f"| {name} ({machines}) | {profile.weights['recipe']} | {layout} | {tokens} | {on} | SGLang 0.5.23 | - |\n"


def table() -> str:
    return HEAD + "".join(row(profile, role) for profile in map(load, names()) for role in profile.roles.values())


if __name__ == "__main__":
    entries = json.loads(REHEARSED.read_text())
    for path in sys.argv[1:]:
        keep(json.loads(Path(path).read_text()), entries)
    REHEARSED.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")
    text = README.read_text(encoding="utf-8")
    start = text.index(HEAD.split("weights", 1)[0])
    end = text.index("\n\n", start) + 1
    README.write_text(text[:start] + table() + text[end:], encoding="utf-8")
