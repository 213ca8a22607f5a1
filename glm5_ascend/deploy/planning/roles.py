"""A plan's engines as roles of a deployment, with the `vllm serve` command of each for the stable vllm-ascend.

Flags that do not depend on the layout (parsers, seed, chat template) are those of the shipped profiles. A launcher sets
the shell variables HEAD (address of the engine's first node), IP and NIC (of the machine), ENGINE (number of the engine
in its role), RANK (of the server in its engine), LOCAL (number of the server on its machine) and DEVICES (its dies).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from glm5_ascend.checkpoint.types import FLOAT, W8A8
from glm5_ascend.deploy.profiles.command import open_command
from glm5_ascend.deploy.profiles.load import Role, load
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.serve.flags import KEY_VARIABLE

#: Profiles with the flags that all engines of an architecture share, and the flags that depend on the layout.
_TEMPLATES = {"glm_moe_dsa": "a3-single-w4a8", "glm5_next": "a3-single-flash"}
_OWN = (
    "tensor-parallel-size", "data-parallel-size", "max-model-len", "max-num-seqs", "max-num-batched-tokens",
    "gpu-memory-utilization", "quantization", "enable-expert-parallel", "enable-prefix-caching", "async-scheduling",
    "compilation-config", "speculative-config", "additional-config", "api-server-count",
)  # fmt: skip
PREFILL, DECODE, SERVER = "prefill", "decode", "server"
_ROLES = {PREFILL: "kv_producer", DECODE: "kv_consumer"}
_PORTS = {PREFILL: (9081, 12321, 30000), DECODE: (9900, 12400, 40000), SERVER: (8000, 12890, 0)}


def roles(model: PlannedModel, layout: Layout, hardware: Hardware, context: int) -> dict[str, Role]:
    """Roles by name: one, or prefill and decode. context: tokens of the longest request."""
    if layout.prefill is None:
        return {SERVER: _role(model, layout, layout.decode, SERVER, hardware, context)}
    pairs = ((PREFILL, layout.prefill), (DECODE, layout.decode))
    return {name: _role(model, layout, engine, name, hardware, context) for name, engine in pairs}


def _role(model: PlannedModel, layout: Layout, engine: Engine, name: str, hardware: Hardware, context: int) -> Role:
    template = load(_TEMPLATES[model.config.model_type]).roles["server"]
    nodes = max(1, -(-engine.dies // hardware.dies_per_node))
    port, rpc, _ = _PORTS[name]
    several = (layout.prefills if name == PREFILL else layout.replicas) > 1
    args = {key: value for key, value in template.args.items() if key not in _OWN}
    if model.expert_type != FLOAT:
        args["quantization"] = "ascend"
    args |= _parallel(engine, name, nodes, f"$(({rpc}+ENGINE))" if several and name != SERVER else rpc)
    tokens = max(engine.batched_tokens, engine.sequences * (engine.drafts + 1))
    args |= {
        "max-model-len": 128 * -(-context // 128), "max-num-seqs": engine.sequences, "max-num-batched-tokens": tokens,
        "gpu-memory-utilization": engine.utilization, "enable-prefix-caching": engine.dcp == 1,
        "async-scheduling": name != PREFILL,
    }  # fmt: skip
    if engine.eager:
        args["enforce-eager"] = True
    else:
        args["compilation-config"] = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    if engine.drafts:
        args["speculative-config"] = {
            "method": "deepseek_mtp", "num_speculative_tokens": engine.drafts, "enforce_eager": True
        }  # fmt: skip
    args["additional-config"] = _additional(model, engine, name)
    if nodes > 1 and engine.expert_parallel and hardware.link(engine.dies) is hardware.links.scale_out:
        args["additional-config"]["enable_mc2_hierarchy_comm"] = True  # experts' dies are joined by RoCE
    if name != SERVER:
        args["kv-transfer-config"] = _transfer(model, layout, name)
    env = template.env | _environment(nodes > 1, name != SERVER) | {"HCCL_BUFFSIZE": str(engine.buffer_mb)}
    if engine.pp > 1:
        env["VLLM_PP_LAYER_PARTITION"] = partition(model, engine)
    if engine.index_cache:
        args["hf-overrides"] = {"use_index_cache": True, "index_topk_freq": 4}
    return Role(name, nodes, name != SERVER, port, env, args)


def _environment(several_nodes: bool, apart: bool) -> dict[str, str]:
    """Variables of the profiles of several machines, and of prefill and decode apart, that a single machine lacks."""
    names = "a3-single-w4a8", "a3-2node", "a3-pd"
    single, multi, pd = (next(iter(load(name).roles.values())).env for name in names)
    added = {key: value for key, value in multi.items() if several_nodes and key not in single}
    added |= {key: value for key, value in pd.items() if apart and key not in multi}
    return {key: re.sub(r"\{(\w+)\}", lambda word: f"${word[1].upper()}", value) for key, value in added.items()}


def partition(model: PlannedModel, engine: Engine) -> str:
    """Layers of each pipeline stage, as VLLM_PP_LAYER_PARTITION has them."""
    return ",".join(str(len(stage)) for stage in engine.stages(model.config))


def _parallel(engine: Engine, name: str, nodes: int, rpc: int | str) -> dict[str, Any]:
    args: dict[str, Any] = {
        "tensor-parallel-size": engine.tp, "data-parallel-size": engine.dp,
        "enable-expert-parallel": engine.expert_parallel,
    }  # fmt: skip
    if engine.pp > 1:
        args["pipeline-parallel-size"] = engine.pp
        if nodes > 1:
            args |= {
                "distributed-executor-backend": "mp", "nnodes": nodes, "node-rank": "$NODE", "master-addr": "$HEAD",
                "master-port": 7060,
            }  # fmt: skip
    if engine.dcp > 1:
        args |= {"decode-context-parallel-size": engine.dcp, "cp-kv-cache-interleave-size": 128}
    if name != SERVER:
        if engine.dp > 1:
            args |= {"data-parallel-rank": "$RANK", "data-parallel-address": "$HEAD", "data-parallel-rpc-port": rpc}
    elif nodes > 1 and engine.dp > 1:
        args |= {
            "data-parallel-size-local": max(1, engine.dp // nodes), "data-parallel-start-rank": "$RANK",
            "data-parallel-address": "$HEAD", "data-parallel-rpc-port": rpc,
        }  # fmt: skip
    return args


def _additional(model: PlannedModel, engine: Engine, name: str) -> dict[str, Any]:
    switches: dict[str, Any] = {"multistream_overlap_shared_expert": True}
    split = name != DECODE and engine.dsa_cp and engine.tp > 1
    if split:  # DSA-CP needs FlashComm
        switches |= {"enable_dsa_cp": True, "enable_flashcomm1": True}
    if model.cache != "none":
        switches["enable_sparse_li_c8"] = True
    if model.cache == "li+sfa":
        switches["enable_sparse_sfa_c8"] = True
    static = model.attention_type == W8A8
    switches["enable_mlapo"] = static and name != PREFILL and not split and model.cache != "li+sfa" and engine.dcp == 1
    if name == DECODE:
        switches["recompute_scheduler_enable"] = True
    elif name == SERVER and not model.config.attention_types:  # the documents of GLM-5.3-Flash leave it out
        switches["enable_balance_scheduling"] = True
    return switches


def _transfer(model: PlannedModel, layout: Layout, name: str) -> dict[str, Any]:
    assert layout.prefill is not None
    prefill, decode = layout.prefill, layout.decode
    sides: dict[str, Any] = {
        "use_ascend_direct": True,
        "prefill": {"dp_size": prefill.dp, "tp_size": prefill.tp},
        "decode": {"dp_size": decode.dp, "tp_size": decode.tp},
    }
    if prefill.pp > 1:
        sides["prefill"] |= {"pp_size": prefill.pp, "pp_layer_partition": partition(model, prefill)}
    # Ports and ids are unique where several engines share a machine: an engine takes kv_port + number of the die.
    return {
        "kv_connector": "MooncakeConnectorV1", "kv_role": _ROLES[name], "kv_port": f"$(({_PORTS[name][2]}+256*ENGINE))",
        "engine_id": f"{name}-$ENGINE-$RANK", "kv_connector_extra_config": sides,
    }  # fmt: skip


def argv(role: Role) -> list[str]:
    port = f"$(({role.port}+LOCAL))" if role.per_rank else str(role.port)
    return [arg.replace("{port}", port) for arg in open_command(role, "DIR", []).argv]


#: These servers listen on every address: the shell stops where no key is set.
_KEY = f'{KEY_VARIABLE}="${{{KEY_VARIABLE}:?set it, or anyone may use the server}}"'


def lines(model: PlannedModel, layout: Layout, hardware: Hardware, context: int) -> Iterator[tuple[str, str]]:
    """Yield each role with its variables and command as one line for a shell."""
    for name, role in roles(model, layout, hardware, context).items():
        env = " ".join(f"{key}={_quoted(value)}" for key, value in role.env.items())
        yield name, f"{_KEY} {env} {' '.join(map(_quoted, argv(role)))}"


def _quoted(word: str) -> str:
    if "$" in word:
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shlex.quote(word)
