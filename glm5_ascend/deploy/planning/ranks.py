"""The planner's memory of a role's dies, which `rehearse` compares with what vllm-ascend's code allocates."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rehearsal.result import PlannedRank
from glm5_ascend.engine_lines import EngineLine
from glm5_ascend.plan.hardware import known_hardware, load_hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.memory import stage_fit
from glm5_ascend.plan.model import from_directory
from glm5_ascend.plan.weights import copies


def planned_ranks(checkpoint: Path, profile: Profile, role: Role, line: EngineLine) -> tuple[PlannedRank, ...]:
    """One die of each pipeline stage; empty where the planner does not know the machine.

    Raises:
        CheckpointError, ConfigError: the planner refuses the checkpoint or the layout.
    """
    machine = str(profile.hardware["node"])
    if machine not in known_hardware():
        return ()
    model = from_directory(checkpoint, role.int8_caches)
    engine = engine_of(role, line)
    connector = role.args.get("kv-transfer-config", {}).get("kv_role")
    apart = connector in ("kv_consumer", "kv_producer")
    mixed = connector == "kv_both" and line.copies.mixed_is_decode and not engine.dsa_cp
    decode_only = connector == "kv_consumer"
    ranks = []
    for stage in engine.stages(model.config):
        memory = stage_fit(model, load_hardware(machine), engine, stage, decode_only, apart)
        copied = copies(model, engine, decode_only or mixed, apart, stage)
        weights = sum(memory.weights.values()) + int(sum(copied.values()))
        states = memory.state_tokens * memory.bytes_per_token
        ranks.append(PlannedRank(weights, memory.bytes_per_token, int(memory.budgets["value"]) + weights, states))
    return tuple(ranks)


def engine_of(role: Role, line: EngineLine) -> Engine:
    """A role of vllm-ascend as the planner's engine."""
    args, switches = role.args, role.args.get("additional-config", {})
    partition = role.env.get("VLLM_PP_LAYER_PARTITION", "").split(",")
    return Engine(
        tp=int(args.get("tensor-parallel-size", 1)), dp=int(args.get("data-parallel-size", 1)),
        dcp=int(args.get("decode-context-parallel-size", 1)), pp=int(args.get("pipeline-parallel-size", 1)),
        drafts=int(args.get("speculative-config", {}).get("num_speculative_tokens", 0)),
        sequences=int(args["max-num-seqs"]), batched_tokens=int(args["max-num-batched-tokens"]),
        utilization=float(args["gpu-memory-utilization"]), buffer_mb=int(role.env.get("HCCL_BUFFSIZE", 200)),
        flashcomm=bool(switches.get("enable_flashcomm1")), mlapo=bool(switches.get("enable_mlapo", True)), line=line,
        dsa_cp=bool(switches.get("enable_dsa_cp")), eager=bool(args.get("enforce-eager")),
        index_cache=bool(args.get("hf-overrides", {}).get("use_index_cache")),
        expert_parallel=bool(args.get("enable-expert-parallel")),
        partition=tuple(int(layers) for layers in partition if layers),
    )  # fmt: skip
