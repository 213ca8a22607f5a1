"""Rule by rule: each finds the environment it was written for, and nothing once the one thing is put right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from glm5_ascend.checkpoint.summary import summarize
from glm5_ascend.deploy.profiles.command import open_command
from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.deploy.rules import machine
from glm5_ascend.deploy.rules.expression import holds, names_in
from glm5_ascend.deploy.rules.facts import COMMON, of_command, of_profile, of_sglang_command
from glm5_ascend.deploy.rules.load import ERROR, WARNING, judge, rules
from glm5_ascend.deploy.rules.preflight import facts_for
from glm5_ascend.engine_lines import SGLANG, SGLANG_05, STABLE, VLLM_ASCEND_030
from glm5_ascend.serve.flag_table import FlagTable, flag_table
from glm5_ascend.serve.flags import normal_form, parsed_flags, without


class Recorded(yaml.SafeLoader):
    """YAML with `!v 1.2.3` for versions."""


Recorded.add_constructor("!v", lambda loader, node: Version(loader.construct_scalar(node)))
RECORDED: dict[str, Any] = yaml.load((Path(__file__).parent / "recorded.yaml").read_text(), Recorded)
HEALTHY, CASES = RECORDED["healthy"], RECORDED["cases"]


TABLE, NEWER = flag_table(STABLE.flags), flag_table(VLLM_ASCEND_030.flags)


def broken_ids(facts: dict[str, Any]) -> set[str]:
    return {item.id for item in judge(facts)[0]}


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    assert [rule.id for rule in rules()] == list(dict.fromkeys(rule.id for rule in rules()))
    assert set(CASES) == {rule.id for rule in rules()}


def test_rules_are_complete_and_speak_of_known_facts() -> None:
    for rule in rules():
        assert rule.level in (ERROR, WARNING) and rule.message and rule.fix and rule.source, rule.id
        assert names_in(rule.when) <= set(HEALTHY), rule.id


def test_every_fact_is_found_somewhere(tiny_w4a8: Path) -> None:
    """In the profile, its command, the checkpoint or the machine; HBM and CANN are those of an Atlas."""
    profile = load("a3-single-w4a8")
    facts, _ = facts_for(profile, profile.role(None), summarize(tiny_w4a8), [])
    assert facts.keys() | machine.facts().keys() | {"hbm_gib", "cann"} == set(HEALTHY)


def test_a_healthy_environment_breaks_no_rule() -> None:
    assert judge(HEALTHY) == ([], {})


@pytest.mark.parametrize("rule", CASES)
def test_the_rule_finds_its_case_and_only_that(rule: str) -> None:
    case = CASES[rule]
    assert case["source"]
    bad = {**HEALTHY, **case["bad"]}
    assert rule in broken_ids(bad)
    assert rule not in broken_ids({**bad, **case["good"]})


@pytest.mark.parametrize("rule", CASES)
def test_what_nobody_knows_is_not_called_good(rule: str) -> None:
    """Without the facts of its own the rule says that it was not checked."""
    (when,) = (item.when for item in rules() if item.id == rule)
    assert rule in judge({})[1]
    assert judge({})[1][rule] == sorted(names_in(when))


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        ({"triton": False, "our_plugin": False}, {"P28"}),
        ({"triton": False}, {"P28w"}),
        ({"our_plugin": False}, set()),
        ({"triton": False, "our_plugin": False, "max_model_len": 2048}, set()),
    ],
)
def test_a_wrong_rotation_is_an_error_only_where_nothing_mends_it(facts: dict[str, Any], rule: set[str]) -> None:
    assert broken_ids({**HEALTHY, **facts}) == rule


@pytest.mark.parametrize("rule", ["P40", "F1", "P32", "P32w", "P54", "P48"])
def test_a_rule_of_the_first_line_alone_is_silent_on_the_next(rule: str) -> None:
    """0.30.0rc2 does not refuse it, or no longer knows the key (rule V11)."""
    bad = {**HEALTHY, **CASES[rule]["bad"]}
    assert rule in broken_ids(bad) and rule not in broken_ids({**bad, "vllm_ascend": Version("0.30.0rc2")})


def test_0_30_reads_other_switches_between_a2_machines_and_for_embeddings() -> None:
    newer = {**HEALTHY, "vllm_ascend": Version("0.30.0rc2"), "transformers": Version("5.14.1")}
    far = {"node": "a2", "nodes": 2, "hccl_intra": True}
    assert "P52" not in broken_ids({**HEALTHY, **far}) and "P52" in broken_ids({**newer, **far})
    assert "P42" in broken_ids({**HEALTHY, "embedding_tp": 4}) and "P42" not in broken_ids({**newer, "embedding_tp": 4})


def test_messages_have_their_values() -> None:
    (broken_rule,) = (item for item in judge({**HEALTHY, **CASES["P13"]["bad"]})[0] if item.id == "P13")
    assert broken_rule.message.startswith("decode context parallelism 8 must equal tensor parallelism 16")
    for rule, case in CASES.items():
        (item,) = (item for item in judge({**HEALTHY, **case["bad"]})[0] if item.id == rule)
        assert "{" not in item.message and "unknown)" not in item.message, item.message


@pytest.mark.parametrize(
    ("text", "facts", "answer"),
    [
        ("a and b", {"a": False}, False),
        ("a and b", {"a": True}, None),
        ("a or b", {"a": True}, True),
        ("a or b", {"a": False}, None),
        ("not a", {}, None),
        ("a > 1", {"a": 2}, True),
        ("a % 128 != 0", {"a": 256}, False),
        ("a in (1, 2)", {"a": 3}, False),
        ("v < '0.24'", {"v": Version("0.23.0.post1")}, True),
        ("v == '0.21.0rc1'", {"v": Version("0.21.0rc1")}, True),
        ("v >= '0.24'", {"v": Version("0.27.1.dev0")}, True),
        ("v < '0.24'", {"v": Version("0.24.0rc1")}, False),  # a pre-release of 0.24 is not 0.23
        ("v >= '0.30'", {"v": Version("0.30.0rc2")}, True),
        ("v == '0.21.0rc1'", {"v": Version("0.21.0")}, False),
        ("v == '0.23.0'", {"v": Version("0.23.0.post1")}, True),
        ("v < '1'", {"v": "no version"}, False),
    ],
)
def test_logic_with_unknown_facts(text: str, facts: dict[str, Any], answer: bool | None) -> None:
    assert holds(text, facts) is answer


@pytest.mark.parametrize("text", ["__import__('os')", "a.b", "[x for x in a]", "a if b else c"])
def test_rules_are_no_programs(text: str) -> None:
    with pytest.raises(ValueError, match="rules have no"):
        holds(text, {"a": 1, "b": True})


def test_what_stays_of_a_command_line_in_normal_form() -> None:
    words = ["-tp", "8", "--max_model_len=4k", "--no-enable-prefix-caching", "--enforce-eager", "--seed", "1"]
    words += [
        "--seed=2",
        "--compilation-config.cudagraph_mode",
        "NONE",
        "-q",
        "ascend",
        "--served-model-name",
        "a",
        "b",
    ]
    argv = ["vllm", "serve", "DIR", *normal_form(words, TABLE)]
    assert parsed_flags([*argv, "--port", "{port}", "--kv-transfer-config", "{"], TABLE) == {
        "tensor-parallel-size": 8, "max-model-len": 4000, "enable-prefix-caching": False, "enforce-eager": True,
        "compilation-config": {"cudagraph_mode": "NONE"}, "quantization": "ascend", "served-model-name": ["a", "b"],
        "seed": 2, "port": "{port}", "kv-transfer-config": "{",
    }  # fmt: skip
    facts = of_command(argv, {})
    assert (facts["tp"], facts["max_model_len"], facts["prefix_cache"], facts["graph"]) == (8, 4000, False, "NONE")
    assert without(argv, "--tensor-parallel-size", "--seed")[3:5] == ["--max-model-len", "4000"]
    loose = FlagTable(complete=False)
    assert parsed_flags(normal_form(["--a_b", "1", "--no-c"], loose), loose) == {"a-b": 1, "c": False}


def test_both_spellings_of_int8_caches_are_seen() -> None:
    old = of_command(["vllm", "serve", "D", "--additional-config", '{"enable_sparse_li_c8": true, "no_key": 1}'], {})
    assert (old["sfa_c8"], old["li_c8"], old["old_c8_keys"], old["new_c8_flags"]) == (False, True, True, False)
    assert old["unknown_keys"] == "no_key"
    flags = normal_form(["--kv-cache-dtype", "int8", "--attention_config.indexer_kv_dtype", "int8"], NEWER)
    new = of_command(["vllm", "serve", "D", *flags], {}, VLLM_ASCEND_030)
    assert (new["sfa_c8"], new["li_c8"], new["old_c8_keys"], new["new_c8_flags"]) == (True, True, False, True)


def test_the_exchange_buffer_is_that_of_the_formula() -> None:
    """Values computed by hand from CANN's formula for the shipped layouts."""
    for profile, role, megabytes in (
        ("rollout", "server", 827),
        ("a3-pd", "decode", 207),
        ("a3-single-w4a8", "server", 26),
    ):
        selected = load(profile).role(role)
        assert of_command(open_command(selected, "DIR", []).argv, {})["exchange_buffer"] == megabytes


@pytest.mark.parametrize("profile", [name for name in names() if load(name).platform == "npu"])
def test_no_profile_breaks_a_rule(profile: str) -> None:
    """Every one of ours, on a healthy machine with the checkpoint it is for; warnings are the ones it names itself."""
    loaded = load(profile)
    named = {
        ("a3-single-w4a8-conservative", "server"): {"P17"}, ("a3-1m", "server"): {"P7w", "P61", "P63", "P76"},
        ("a3-single-w4a8-pool", "server"): {"P64"},
        ("a3-pd", "decode"): {"P55"}, ("a3-pd-pp2", "decode"): {"P55"},
    }  # fmt: skip
    for role in loaded.roles.values():
        argv = open_command(role, "DIR", []).argv
        if role.engine == SGLANG:
            healthy = {name: value for name, value in HEALTHY.items() if name in COMMON}
            facts = {**healthy, **of_profile(loaded, role), **of_sglang_command(argv, role.env)}
        else:
            facts = {**HEALTHY, **of_profile(loaded, role), **of_command(argv, role.env)}
            facts["vllm_ascend"] = Version(loaded.line.tested[0])
        facts["device_count"] = facts["dies"]
        broken = judge(facts)[0]
        assert not [item for item in broken if item.level == ERROR]
        assert {item.id for item in broken} == named.get((profile, role.name), set())


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["--moe-a2a-backend", "none"], "S1"),
        (["--moe-a2a-backend=none", "--ep-size", "8"], "S1"),
        (["--cuda-graph-bs", "16"], "S3"),
        (["--nsa-prefill-cp-mode", "in-seq-split"], "S3"),
    ],
)
def test_sglangs_flags_are_judged(flags: list[str], rule: str) -> None:
    role = load("a3-single-w4a8-sglang").role(None)
    table = flag_table(SGLANG_05.flags)
    argv = open_command(role, "DIR", normal_form(flags, table)).argv
    facts = {name: HEALTHY[name] for name in COMMON} | of_sglang_command(argv, {})
    assert broken_ids(facts) == {rule}
    good = normal_form([*flags, "--ep-size", "16"], table) if rule == "S1" else []
    facts |= of_sglang_command(open_command(role, "DIR", good).argv, {})
    assert broken_ids(facts) == set()


def test_a_draft_that_inherits_the_quantization_is_judged() -> None:
    argv = ["python", "-m", "sglang.launch_server", "--model-path", "DIR", "--speculative-algorithm", "NEXTN"]
    assert "S2" not in broken_ids({**HEALTHY, **of_sglang_command(argv, {})})
    argv += ["--quantization", "modelslim"]
    assert "S2" in broken_ids({**HEALTHY, **of_sglang_command(argv, {})})
    argv += ["--speculative-draft-model-quantization", "unquant"]
    assert "S2" not in broken_ids({**HEALTHY, **of_sglang_command(argv, {})})


def test_the_old_variable_counts_where_the_key_is_not_given() -> None:
    argv = ["vllm", "serve", "DIR"]
    assert of_command(argv, {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"})["flashcomm1"] is True
    argv += ["--additional-config", '{"enable_flashcomm1": false}']
    assert of_command(argv, {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"})["flashcomm1"] is False
