"""Deploy profiles: what each says about itself agrees with the flags it gives, and a cache fits beside its weights."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from glm5_ascend.deploy.profiles.command import command
from glm5_ascend.deploy.profiles.file import SwitchName
from glm5_ascend.deploy.profiles.load import Profile, Role, load, merge, names, without_nulls
from glm5_ascend.engine_lines import SGLANG, VLLM
from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.flags import value_of
from glm5_ascend.serve.options import ServeOptions
from tests.deploy.support.rendered import placed, switches

ROLES = [(profile, role) for profile in map(load, names()) for role in profile.roles.values()]
ON_ATLAS = [(profile, role) for profile, role in ROLES if profile.platform == "npu"]
VLLM_ON_ATLAS = [(profile, role) for profile, role in ON_ATLAS if profile.engine == VLLM]
HBM_GIB = 64  # per die of A2 and A3


def ids(value: Profile | Role) -> str:
    return value.name


def switched_on(role: Role) -> dict[str, bool]:
    """The scheduling list, read from the flags."""
    args = role.args
    if role.engine == SGLANG:
        return {
            "async_scheduling": not args.get("disable-overlap-schedule"),
            "prefix_cache": not args.get("disable-radix-cache"),
            "ram_tier": "enable-hierarchical-cache" in args,
            "attention_dp": args.get("dp-size", 1) > 1,
            "moe_ep": args.get("moe-a2a-backend") == "deepep",
            "flashcomm": False,
            "mtp": "speculative-algorithm" in args,
            "graph": not args.get("disable-cuda-graph"),
            "mlapo": role.env.get("SGLANG_NPU_USE_MLAPO") == "1",
        }
    additional = args.get("additional-config", {})
    return {
        "async_scheduling": args.get("async-scheduling") is True,
        "prefix_cache": args.get("enable-prefix-caching") is True,
        "ram_tier": any(name in str(args.get("kv-transfer-config", "")) for name in ("Offloading", "AscendStore")),
        "attention_dp": args.get("data-parallel-size", 1) > 1,
        "moe_ep": args.get("enable-expert-parallel") is True,
        "flashcomm": additional.get("enable_flashcomm1") is True,
        "mtp": "speculative-config" in args,
        "graph": "compilation-config" in args and not args.get("enforce-eager"),
        "mlapo": additional.get("enable_mlapo") is True,
    }


@pytest.mark.parametrize(("profile", "role"), ROLES, ids=ids)
def test_the_scheduling_list_tells_what_the_flags_do(profile: Profile, role: Role) -> None:
    assert set(profile.scheduling) == set(get_args(SwitchName))
    assert switches(profile, role) == switched_on(role)
    assert all(switch.why and switch.excludes for switch in profile.scheduling.values())


@pytest.mark.parametrize(("profile", "role"), ON_ATLAS, ids=ids)
def test_the_layout_uses_every_die_once(profile: Profile, role: Role) -> None:
    per_node = 8 if profile.hardware["node"] == "a2" else 16
    assert role.local_ranks * role.rank_dies == per_node
    if role.engine == SGLANG:
        assert role.args["tp-size"] == role.nodes * per_node and role.args.get("nnodes", 1) == role.nodes
    else:
        assert role.local_ranks * role.nodes == role.args.get("data-parallel-size", 1) * role.args.get("nnodes", 1)
        assert role.args.get("nnodes", role.nodes) == role.nodes
    assert sum(r.nodes for r in profile.roles.values()) * per_node == profile.hardware["dies"]


@pytest.mark.parametrize(("profile", "role"), ON_ATLAS, ids=ids)
def test_one_request_of_full_length_fits(profile: Profile, role: Role) -> None:
    """Weights, and what else is known to lie there, leave room for the cache of the longest request."""
    memory = profile.memory
    share, length = ("gpu-memory-utilization", "max-model-len")
    if role.engine == SGLANG:
        share, length = ("mem-fraction-static", "context-length")
    free = HBM_GIB * role.args[share] - memory["weights_gib"] - memory.get("other_gib", 0)
    longest = role.args[length] * memory["kv_bytes_per_token"] / 2**30
    print(f"{profile.name} {role.name}: {free:.1f} GiB free, longest request {longest:.1f} GiB")
    assert longest < free


@pytest.mark.parametrize(("profile", "role"), VLLM_ON_ATLAS, ids=ids)
def test_pd_sizes_are_the_real_ones(profile: Profile, role: Role) -> None:
    transfer = role.args.get("kv-transfer-config")
    if transfer is None or transfer["kv_role"] == "kv_both":
        assert "pd" not in profile.name
        return
    for side in ("prefill", "decode"):
        args, env = profile.roles[side].args, profile.roles[side].env
        sizes = {"dp_size": args.get("data-parallel-size", 1), "tp_size": args["tensor-parallel-size"]}
        if stages := args.get("pipeline-parallel-size"):
            sizes |= {"pp_size": stages, "pp_layer_partition": env["VLLM_PP_LAYER_PARTITION"]}
            layers = [int(count) for count in env["VLLM_PP_LAYER_PARTITION"].split(",")]
            assert len(layers) == stages and sum(layers) == 78
        assert transfer["kv_connector_extra_config"][side] == sizes


def test_engine_ids_and_ports_of_pd_never_meet() -> None:
    profile = load("a3-pd")
    servers = []
    for role in profile.roles.values():
        for node, rank in product(range(role.nodes), range(role.local_ranks)):
            built = command(profile, role, placed(node, rank), "DIR", [])
            (engine,) = (arg.split('"engine_id": "')[1].split('"')[0] for arg in built.argv if "engine_id" in arg)
            servers.append((engine, value_of(built.argv, "--data-parallel-rank"), role.name))
            assert value_of(built.argv, "--port") == str(role.port + rank)
            dies = [int(die) for die in built.env["ASCEND_RT_VISIBLE_DEVICES"].split(",")]
            assert dies == list(range(rank * role.rank_dies, (rank + 1) * role.rank_dies))
    assert len({engine for engine, _, _ in servers}) == len(servers) == 12
    assert [rank for _, rank, role in servers if role == "decode"] == list("01234567")


def test_a_second_node_has_no_api_server() -> None:
    profile = load("rollout")
    argv = command(profile, profile.role(None), placed(2), "DIR", []).argv
    assert "--headless" in argv and "--api-server-count" not in argv
    assert value_of(argv, "--data-parallel-start-rank") == "32"
    argv = command(profile, profile.role(None), placed(0), "DIR", []).argv
    assert "--headless" not in argv and value_of(argv, "--api-server-count") == "4"


def test_ranks_of_sglang_differ_in_their_number_alone() -> None:
    profile = load("a3-2node-sglang")
    first, second = (command(profile, profile.role(None), placed(node), "DIR", []).argv for node in (0, 1))
    assert first[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "DIR"]
    assert [(a, b) for a, b in zip(first, second, strict=True) if a != b] == [("0", "1")]
    assert value_of(second, "--node-rank") == "1" and value_of(second, "--dist-init-addr") == "10.0.0.1:20000"
    start = first.index("--cuda-graph-bs-decode")
    assert first[start + 1 : start + 7] == ["1", "2", "4", "8", "16", "32"]


def test_both_halves_of_sglang_meet_at_one_store() -> None:
    profile = load("a3-pd-sglang")
    for role in profile.roles.values():
        built = command(profile, role, ServeOptions("DIR", head="10.0.0.1"), "DIR", [])
        assert built.env["ASCEND_MF_STORE_URL"] == "tcp://10.0.0.1:24667"
        with pytest.raises(ConfigError, match="the memory store"):
            command(profile, role, ServeOptions("DIR"), "DIR", [])
    assert (
        "--disable-cuda-graph"
        in command(profile, profile.role("prefill"), ServeOptions("DIR", head="h"), "DIR", []).argv
    )


@pytest.mark.parametrize(
    ("server", "role", "message"),
    [
        (ServeOptions("DIR"), None, "has several roles"),
        (ServeOptions("DIR"), "prefil", "has no role 'prefil'"),
        (ServeOptions("DIR", node=2, head="h", ip="10.0.0.2", nic="n"), "decode", "has nodes 0 to 1"),
        (ServeOptions("DIR", rank=4, head="h", ip="10.0.0.2", nic="n"), "decode", "has servers 0 to 3"),
        (ServeOptions("DIR", ip="10.0.0.2", nic="n"), "decode", "needs to know 'head'"),
        (ServeOptions("DIR", head="h", ip="10.0.0.2"), "decode", "needs to know 'nic'"),
    ],
)
def test_places_that_do_not_exist_are_refused(server: ServeOptions, role: str | None, message: str) -> None:
    profile = load("a3-pd")
    with pytest.raises(ConfigError, match=message) as caught:
        command(profile, profile.role(role), server, "DIR", [])
    assert caught.value.tip


def test_an_unknown_profile_is_refused_with_a_guess() -> None:
    with pytest.raises(ConfigError, match="no profile 'a3-single-w4a'") as caught:
        load("a3-single-w4a")
    assert "did you mean a3-single-w4a8" in caught.value.tip
    with pytest.raises(ConfigError):
        load("atlas")  # what the others share is none itself


def test_merging_takes_away_what_is_null() -> None:
    merged = merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None, "e": 4}, "d": None})
    assert without_nulls(merged) == {"a": {"c": 2, "e": 4}}
