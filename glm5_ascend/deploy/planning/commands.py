"""Commands that run a plan: the profile with its layout, and `vllm serve` lines for the stable vllm-ascend.

A profile has the plan's layout if machine, number of nodes, weight types and parallel sizes of every role agree.
"""

from __future__ import annotations

from collections.abc import Iterator

from glm5_ascend.deploy.planning.roles import lines
from glm5_ascend.deploy.profiles.load import Profile, Role, load, names
from glm5_ascend.engine_lines import VLLM
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.result import Plan, PlanCommands

#: Speed and memory of the plan do not apply to the SGLang profiles.
NOT_MODELLED = "SGLang: not modelled; the speeds are fitted to vllm-ascend, for SGLang measure"


def plan_commands(plan: Plan) -> PlanCommands:
    """The profile with the plan's layout, and the lines that run the plan."""
    name = profile_of(plan)
    return PlanCommands(name, tuple(_lines(plan, name)))


def _lines(plan: Plan, name: str | None) -> Iterator[str]:
    if plan.cluster.hardware.measured_on is not None:
        yield "run it: glm5-ascend serve DIR"
        return
    if name is not None:
        yield f"profile: {name}"
        yield f"run it: glm5-ascend serve DIR --profile {name}"
        yield f"or as files: glm5-ascend deploy render --profile {name} --to shell"
    else:
        yield "profile: none of deploy/profiles has this layout; these lines do:"
    yield NOT_MODELLED
    layout = plan.best.layout
    context = plan.workload.prompt + plan.workload.output
    if plan.cluster.nodes * plan.cluster.hardware.dies_per_node > layout.dies:
        idle = plan.cluster.nodes - -(-layout.dies // plan.cluster.hardware.dies_per_node)
        yield f"idle: {idle} of {plan.cluster.nodes} nodes" if idle else "idle: a part of a node"
    counts = {"prefill": layout.prefill_engines, "decode": layout.replicas, "server": layout.replicas}
    for role, line in lines(plan.model, layout, plan.cluster.hardware, context):
        number = f" ({counts[role]} engines)" if counts[role] > 1 else ""
        yield f"{'run it' if role == 'server' else role + ' nodes'}{number}: {line}"


def profile_of(plan: Plan) -> str | None:
    """Name of the first profile of deploy/ with the plan's layout that runs vLLM; None if there is none."""
    return next((name for name in names() if load(name).engine == VLLM and _matches(load(name), plan)), None)


def _matches(profile: Profile, plan: Plan) -> bool:
    """Compare machines, weights and layout; model, context and requests must be within the profile's limits."""
    layout, cluster = plan.best.layout, plan.cluster
    engines = {"decode": layout.decode} | ({"prefill": layout.prefill} if layout.prefill else {})
    by_connector = {
        role.args.get("kv-transfer-config", {}).get("kv_role", "kv_consumer"): role for role in profile.roles.values()
    }
    roles = {"decode": by_connector.get("kv_consumer"), "prefill": by_connector.get("kv_producer")}
    if profile.alternatives or len(profile.roles) != len(engines) or layout.replicas != 1 or layout.prefill_engines > 1:
        return False
    if (profile.hardware["node"], profile.hardware["nodes"]) != (cluster.hardware.name, cluster.nodes):
        return False
    if (profile.weights["experts"], profile.weights["attention"]) != (plan.model.expert_type, _attention(plan)):
        return False
    if plan.model.stored_bytes is None and plan.model.name.upper() not in profile.models:
        return False
    context = plan.workload.prompt + plan.workload.output
    return all((role := roles[name]) is not None and _sizes(role) == _sizes_of(engine) and _serves(role, plan, context)
               and (name == "prefill" or engine.sequences <= int(role.args.get("max-num-seqs", 0)))
               for name, engine in engines.items())  # fmt: skip


def _serves(role: Role, plan: Plan, context: int) -> bool:
    """Compare context and types of the caches."""
    return int(role.args.get("max-model-len", 0)) >= context and role.int8_caches == plan.model.cache


def _attention(plan: Plan) -> str:
    return plan.model.type_of(0, "self_attn.q_a_proj")


def _sizes(role: Role) -> tuple[int, ...]:
    kinds = ("tensor", "data", "decode-context", "pipeline")
    return (*(int(role.args.get(f"{kind}-parallel-size", 1)) for kind in kinds),
            bool(role.args.get("enable-expert-parallel")))  # fmt: skip


def _sizes_of(engine: Engine) -> tuple[int, ...]:
    return engine.tp, engine.dp, engine.dcp, engine.pp, engine.expert_parallel
