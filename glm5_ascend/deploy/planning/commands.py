"""Commands that run a plan: the profile with its layout, and `vllm serve` lines for the stable vllm-ascend.

A plan names a profile only if it was computed with all settings of the profile (plan/data/proven.yaml).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from glm5_ascend.deploy.planning.roles import lines
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.plan.api import Plan

VARIABLES = (
    "set for each server: HEAD (first machine of its engine), IP, NIC, DEVICES (its dies), and numbers from 0: ENGINE "
    "(of its role), NODE (machine in the engine), RANK (in the engine), LOCAL (server on the machine)"
)
#: Speed and memory of the plan do not apply to the SGLang profiles.
NOT_MODELLED = "SGLang: not modelled; the speeds are fitted to vllm-ascend, for SGLang measure"


def with_commands(plan: Plan) -> Plan:
    """The plan with the profile of its layout, and the lines that run it."""
    name = profile_of(plan)
    return replace(plan, profile=name, lines=tuple(_lines(plan, name)))


def _lines(plan: Plan, name: str | None) -> Iterator[str]:
    layout, hardware, load = plan.best.layout, plan.question.hardware, plan.question.workload
    if name is not None:
        yield f"profile: {name}"
        yield f"run it: glm5-ascend serve DIR --profile {name}"
        yield f"or as files: glm5-ascend deploy render --profile {name} --to shell"
    else:
        near = plan.best.evidence.source.partition("profile ")[2].partition(";")[0]
        differs = f" ({near} has other settings, or serves another model, cache or shorter context)" if near else ""
        yield f"profile: none of deploy/profiles has exactly this{differs}; these lines do:"
        if layout.prefill or layout.replicas > 1 or layout.decode.dies > hardware.dies_per_node:
            yield VARIABLES
    yield NOT_MODELLED
    counts = {"prefill": layout.prefills, "decode": layout.replicas, "server": layout.replicas}
    for role, line in lines(plan.question.model, layout, hardware, load.prompt + load.output):
        engines = f" ({counts[role]} engines)" if counts[role] > 1 else ""
        yield f"{'run it' if role == 'server' else role + ' nodes'}{engines}: {line}"


def profile_of(plan: Plan) -> str | None:
    """The profile whose engines the plan has, with all their settings, if it can serve the model and the load."""
    name = plan.best.evidence.profile
    if name is None:
        return None
    profile, model, workload = load(name), plan.question.model, plan.question.workload
    context = workload.prompt + workload.output
    named = model.stored_bytes is not None or model.name.upper() in map(str.upper, profile.models)
    weights = {"experts": model.expert_type, "attention": model.attention_type}
    same = weights.items() <= profile.weights.items()
    roles = profile.roles.values()
    serves = all(int(role.args["max-model-len"]) >= context and role.int8_caches == model.cache for role in roles)
    return name if named and same and serves else None
