"""The servers that a file of vllm-ascend's CI starts, as switches that a profile's can be compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Switches = dict[str, Any]
#: What every place has its own of: addresses, ports, names of the two halves' engines.
OF_A_PLACE = {
    "host", "port", "data-parallel-rank", "data-parallel-address", "data-parallel-rpc-port",
    "kv-transfer-config.kv_port", "kv-transfer-config.engine_id", "SERVER_PORT", "ASCEND_RT_VISIBLE_DEVICES",
    "HCCL_IF_IP", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME",
}  # fmt: skip
#: What clients see, where the model comes from, and whether vLLM reports its use to its makers.
OF_THE_FRONT = {
    "served-model-name", "shutdown-timeout", "enable-auto-tool-choice", "tool-call-parser", "reasoning-parser",
    "chat-template-content-format", "trust-remote-code", "VLLM_USE_MODELSCOPE", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS",
}  # fmt: skip
#: What vLLM takes where nothing is said; tests/contract/test_cited_runs.py asks it.
DEFAULTS: Switches = {
    "async-scheduling": True, "enable-chunked-prefill": True, "enable-prefix-caching": True, "data-parallel-size": "1",
    "pipeline-parallel-size": "1", "prefill-context-parallel-size": "1", "api-server-count": "1", "block-size": "128",
    "additional-config.recompute_scheduler_enable": False,
}  # fmt: skip
#: Later places and spellings -> those of 0.23.0.
SPELLED = {
    "additional-config.scheduler_config.enable_balance_scheduling": "additional-config.enable_balance_scheduling",
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": "additional-config.enable_flashcomm1",
    "attention-config.indexer-kv-dtype": "additional-config.enable_sparse_li_c8",
}
#: Words that mean true.
TRUE = {("additional-config.enable_flashcomm1", "1"), ("additional-config.enable_sparse_li_c8", "int8")}


def servers(path: Path) -> dict[str, Switches]:
    """Role -> switches; `server` where all are alike."""
    data = yaml.safe_load(path.read_text())
    if "test_cases" in data:
        return {"server": switches(*only_server(path))}
    sizes = {item["node_index"]: {"dp": item["dp_size"], "tp": item["tp_size"]} for item in data["config"]}
    groups = data["routing"]["groups"]
    collected = {}
    for role, group in (("prefill", groups["prefiller"]), ("decode", groups["decoder"])):
        (template,) = (item for item in data["templates"] if item["node_index"] == group[0])
        size = {"${DP_SIZE}": str(sizes[group[0]]["dp"]), "${TP_SIZE}": str(sizes[group[0]]["tp"])}
        line = [size.get(str(word), str(word)) for word in template["server_cmd_template"]]
        collected[role] = switches(template["envs"], line)
    return collected


def only_server(path: Path) -> tuple[dict[str, str], list[str]]:
    """Variables and flags of a file with one server, as they stand there."""
    (case,) = yaml.safe_load(path.read_text())["test_cases"]
    line = [*case["server_cmd"], *case.get("server_cmd_extra", [])]
    return {name: str(value) for name, value in case["envs"].items()}, [str(word) for word in line]


def switches(env: Mapping[str, str], line: Sequence[str]) -> Switches:
    """Variables and flags; maps key by key, `--no-x` as x: False."""
    collected: Switches = {name: str(value) for name, value in env.items()}
    words = list(line)
    while words:
        flag = words.pop(0).removeprefix("--").replace("_", "-")
        value: Any = True if not words or words[0].startswith("--") else words.pop(0)
        if value is True and flag.startswith("no-"):
            flag, value = flag.removeprefix("no-"), False
        collected |= flat(flag, json.loads(value) if str(value).startswith("{") else value)
    spelled = {SPELLED.get(name, name): value for name, value in collected.items()}
    spelled = {name: True if (name, str(value)) in TRUE else value for name, value in spelled.items()}
    remaining = {name: value for name, value in spelled.items() if name not in OF_A_PLACE | OF_THE_FRONT}
    return DEFAULTS | remaining


def flat(name: str, value: Any) -> Switches:
    """Maps key by key; numbers as texts of one spelling."""
    if isinstance(value, dict):
        return {key: item for inner, part in value.items() for key, item in flat(f"{name}.{inner}", part).items()}
    if isinstance(value, bool | list):
        return {name: value}
    return {name: f"{float(value):g}" if str(value).replace(".", "", 1).isdecimal() else str(value)}
