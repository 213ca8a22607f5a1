"""Every deploy profile through vLLM's own parser and vllm-ascend's own configuration code, both lines, on a CPU.

The configuration is built to its end (`create_engine_config`, with the NPU platform's checks); no engine starts. The
model is a tiny GLM-5 with heads enough for TP16. Mooncake's library is stood in for: configuring calls nothing of it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from glm5_ascend.deploy.profiles.command import command
from glm5_ascend.deploy.profiles.load import Profile, Role, load, names
from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from glm5_ascend.engine_lines import STABLE, vllm_ascend_line
from glm5_ascend.serve.options import ServeOptions
from tests.contract.support.tiny_glm5 import tiny_glm5
from tests.deploy.support.rendered import switches

pytestmark = pytest.mark.contract
ROLES = [
    (profile, role, node)
    for profile in map(load, names())
    if profile.line is STABLE
    for role in profile.roles.values()
    for node in sorted({0, role.nodes - 1})
]
#: Combinations the code must refuse: that it checks at all.
BAD = {
    "balance scheduling with PD": {
        "kv-transfer-config": {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer"}
    },
    "recompute without PD": {"additional-config": {"recompute_scheduler_enable": True}},
    "DCP unlike TP": {"decode-context-parallel-size": 8, "additional-config": {}},
}


def key(profile: Profile, role: Role, node: int) -> str:
    return f"{profile.name} {role.name} {node}"


@pytest.fixture(scope="module")
def answers(line: RehearsalEnvironment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Configurations of all roles by the code of one line, in the spelling that its version reads."""
    version = line.version
    folder = tmp_path_factory.mktemp("profiles")
    model = tiny_glm5(folder)
    commands: dict[str, Any] = {}
    for profile, written, node in ROLES:
        role = written.for_line(vllm_ascend_line(version))
        options = ServeOptions("DIR", node=node, rank=0, head="127.0.0.1", ip="127.0.0.1", nic="lo")
        built = command(profile, role, options, str(model), [])
        # The tiny model has three layers, and 0.30 counts.
        stages = {name: "2,1" for name in built.env if name == "VLLM_PP_LAYER_PARTITION"}
        commands[key(profile, role, node)] = {"env": built.env | stages, "argv": built.argv}
        for name, switch in profile.scheduling.items():
            if switch.add and node == 0:
                with_it = command(
                    profile,
                    role,
                    ServeOptions("DIR", node=0, rank=0, head="127.0.0.1", ip="127.0.0.1", nic="lo"),
                    str(model),
                    [*switch.add],
                )
                commands[f"{profile.name} + {name}"] = {"env": built.env, "argv": with_it.argv}
    single = load("a3-single-w4a8")
    for name, flags in BAD.items():
        extra = [part for flag, value in flags.items() for part in (f"--{flag}", json.dumps(value))]
        built = command(
            single, single.role(None).for_line(vllm_ascend_line(version)), ServeOptions("DIR"), str(model), extra
        )
        commands[name] = {"env": built.env, "argv": built.argv}
    (folder / "commands.json").write_text(json.dumps(commands))
    line.run("vllm_ascend_on_cpu.profiles", folder / "commands.json", folder / "out.json")
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return report


@pytest.mark.parametrize(("profile", "role", "node"), ROLES, ids=lambda v: getattr(v, "name", str(v)))
def test_it_is_accepted_and_means_what_the_profile_says(
    answers: dict[str, Any], profile: Profile, role: Role, node: int
) -> None:
    answer = answers["commands"][key(profile, role, node)]
    assert "error" not in answer, answer["error"]
    became = answer["became"]
    on = switches(profile, role)
    assert became["quantization"] == "ascend" and became["block_size"] == 128
    assert became["async_scheduling"] == on["async_scheduling"]
    assert became["prefix_caching"] == on["prefix_cache"]
    assert (became["data_parallel"] > 1) == on["attention_dp"]
    assert became["expert_parallel"] == on["moe_ep"]
    assert became["flashcomm"] == on["flashcomm"]
    assert (became["draft_tokens"] > 0) == on["mtp"]
    assert (became["graph"] == "FULL_DECODE_ONLY") == on["graph"]
    if on["mlapo"]:
        assert became["mlapo"]
    assert became["tensor_parallel"] == role.args["tensor-parallel-size"]


def test_the_optional_switches_are_accepted(answers: dict[str, Any]) -> None:
    added = {name: answer for name, answer in answers["commands"].items() if " + " in name}
    assert any("ram_tier" in name for name in added)
    for name, answer in added.items():
        assert "error" not in answer, f"{name}: {answer['error']}"
        if "ram_tier" in name:
            assert answer["became"]["connector"] == "OffloadingConnector"


@pytest.mark.parametrize("name", BAD)
def test_bad_combinations_are_refused_by_the_same_code(answers: dict[str, Any], name: str) -> None:
    assert "error" in answers["commands"][name]


def test_vllm_variables_exist(answers: dict[str, Any]) -> None:
    used = {name for _, role, _ in ROLES for name in role.env if name.startswith("VLLM_")}
    assert used <= set(answers["variables"])


def test_keys_of_additional_config_are_read(answers: dict[str, Any]) -> None:
    used = {name for _, role, _ in ROLES for name in all_keys(role.args.get("additional-config", {}))}
    assert used <= set(answers["words"])


def all_keys(value: Any) -> set[str]:
    if not isinstance(value, dict):
        return set()
    return set(value) | {inner for item in value.values() for inner in all_keys(item)}
