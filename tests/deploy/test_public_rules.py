"""Profiles, rules and versions of public threads: what `doctor` and `serve` say about each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rules.preflight import facts_for, preflight, stage_on_shared
from glm5_ascend.engine_lines import VLLM_ASCEND_030
from tests.conftest import Copy
from tests.deploy.support.public_cases import PROFILE, broken
from tests.support.command import assert_one_clear_line, in_process, worked
from tests.support.tiny_model import change_json

pytestmark = pytest.mark.usefixtures("clean_environment")


def multi(role: str, **decode: int) -> dict[str, Any]:
    """--kv-transfer-config of vllm-ascend's document GLM5.3.md: Mooncake and a pool inside of MultiConnector."""
    sizes = {"prefill": {"dp_size": 4, "tp_size": 8}, "decode": {"dp_size": 8, "tp_size": 4, **decode}}
    mooncake = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": role,
        "kv_port": "30000",
        "kv_connector_extra_config": {"use_ascend_direct": True, **sizes},
    }
    pool = {
        "kv_connector": "AscendStoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"backend": "memcache", "lookup_rpc_port": "0"},
    }
    return {
        "kv_connector": "MultiConnector", "kv_role": role, "kv_port": "30000", "engine_id": "0",
        "kv_connector_extra_config": {"connectors": [mooncake, pool]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("transfer", "dp", "tp", "rules"),
    [
        (multi("kv_producer"), 4, 8, {"P64"}),
        (multi("kv_consumer"), 8, 4, {"P64"}),
        (multi("kv_consumer", tp_size=8), 8, 4, {"P39", "P64"}),
        ({**multi("kv_producer"), "kv_role": "kv_both"}, 4, 8, {"P64"}),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, 4, 8, set()),
        ({"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer"}, 4, 8, {"P39"}),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"connectors": [3]},
            },
            4,
            8,
            set(),
        ),
    ],
)
def test_sizes_of_prefill_and_decode_are_read_at_every_depth(
    transfer: dict[str, Any], dp: int, tp: int, rules: set[str]
) -> None:
    words = ["--kv-transfer-config", json.dumps(transfer), "-dp", str(dp), "-tp", str(tp)]
    facts, _ = facts_for(load("a3-pd"), load("a3-pd").role("prefill"), None, words)
    assert facts["pd"] and {"P39"} & rules == ({"P39"} if not facts["pd_sizes_match"] else set())
    assert facts["kv_pool"] is ("P64" in rules)


DOCUMENTED = """
    --enable-expert-parallel --enable-chunked-prefill --enable-prefix-caching --seed 1024 --max-model-len 200000
    --max-num-batched-tokens 8192 --trust-remote-code --max-num-seqs 64 --gpu-memory-utilization 0.92
    --async-scheduling --quantization ascend --safetensors-load-strategy prefetch --enable-auto-tool-choice
    --tool-call-parser glm47 --reasoning-parser glm47 --enforce-eager --api-server-count 8 -dp 4 -tp 8
"""


def test_the_command_of_the_document_is_not_refused(tiny_w8a8: Path) -> None:
    """Prefill of GLM5.3.md, 0.30.0rc2, section 5.2: nothing of it is an error on the line that it is for."""
    flags = DOCUMENTED.split()
    flags += ["--additional-config", '{"enable_dsa_cp":true,"enable_fused_mc2":1,"enable_flashcomm1":true}']
    flags += ["--speculative-config", '{"num_speculative_tokens":1,"method":"deepseek_mtp","enforce_eager":true}']
    flags += ["--kv-transfer-config", json.dumps(multi("kv_producer"))]
    place = ["--role", "prefill", "--head", "h", "--ip", "10.0.0.1", "--nic", "e"]
    done = worked(in_process("serve", tiny_w8a8, "--profile", "a3-pd", *place, "--dry-run", "--", *flags))
    assert "error" not in done.stderr and "warning P64" in done.stderr


FULL, SHARED = "full", "shared"
#: GLM-5.2.
EVERY_FOURTH = tuple(FULL if i < 3 or i % 4 == 2 else SHARED for i in range(78))


@pytest.mark.parametrize(
    ("indexers", "stages", "partition", "layer"),
    [
        (EVERY_FOURTH, 2, "41,37", 41),
        (EVERY_FOURTH, 2, "", 39),
        (EVERY_FOURTH, 2, "42,36", 0),
        ((FULL,) * 78, 2, "41,37", 0),
        ((FULL, FULL, SHARED, FULL), 2, "", 2),
        ((FULL, FULL, SHARED, FULL), 1, "", 0),
    ],
)
def test_a_stage_that_begins_on_a_shared_indexer(
    indexers: tuple[str, ...], stages: int, partition: str, layer: int
) -> None:
    assert stage_on_shared(indexers, stages, partition) == layer


@pytest.mark.parametrize(
    ("profile", "role", "flags", "rules"),
    [
        (PROFILE, None, "--kv-cache-dtype fp8", {"P59w"}),
        (PROFILE, None, "--kv-cache-dtype fp8_e4m3", {"P59w"}),
        ("a3-single-w4a8-sglang", None, "--quantization w8a8_int8", {"S5"}),
        (
            "a3-pd",
            "prefill",
            '--speculative-config {"method":"deepseek_mtp","num_speculative_tokens":3,"enforce_eager":true}',
            {"P60"},
        ),
        (PROFILE, None, '--additional-config {"enable_sparse_li_c8":true}', {"P61"}),
        (PROFILE, None, '--additional-config {"enable_fused_mc2":1}', {"P4", "P62"}),
        (PROFILE, None, "-dcp 16 --no-enable-prefix-caching", {"P63"}),
        (PROFILE, None, '--kv-transfer-config {"kv_connector":"AscendStoreConnector","kv_role":"kv_both"}', {"P64"}),
        (PROFILE, None, '--additional-config {"fuse_muls_add":true}', {"V11w"}),
    ],
)
def test_rules_of_the_threads(profile: str, role: str | None, flags: str, rules: set[str]) -> None:
    assert broken(profile, flags, role) == rules


def test_flags_of_the_newer_line_are_judged_by_the_newer_line() -> None:
    (result,) = preflight(load(PROFILE), None, None, ["--kv-cache-dtype", "int8", "-ac.indexer_kv_dtype", "int8"])
    assert result.line is VLLM_ASCEND_030 and "P54" not in {one.id for one in result.broken}
    (result,) = preflight(
        load(PROFILE), None, None, ["--kv-cache-dtype", "fp8", "--attention-config.indexer_kv_dtype=fp8"]
    )
    assert "P59" in {one.id for one in result.broken}


def test_sizes_are_those_of_the_checkpoint(tiny_w4a8: Path, editable: Copy) -> None:
    """168 experts, as REAP leaves them: 16 ranks do not divide them, 8 do. Only config.json is asked."""
    from glm5_ascend.checkpoint.summary import summarize

    pruned = editable(tiny_w4a8)
    change_json(pruned / "config.json", n_routed_experts=168, num_attention_heads=64)
    summary, profile = summarize(pruned), load(PROFILE)
    for flags, rules in (("", {"P50"}), ("-tp 8", set()), ("-tp 12", {"P67"}), ("-tp 8 -dp 2", {"P50"})):
        (result,) = preflight(profile, summary, None, flags.split())
        assert {one.id for one in result.broken} & {"P50", "P67"} == rules, flags
    redundant = ["--additional-config", '{"eplb_config": {"num_redundant_experts": 8}}']
    (result,) = preflight(profile, summary, None, redundant)
    assert "P50" not in {one.id for one in result.broken}
    facts, _ = facts_for(profile, profile.role(None), summary, [])
    assert (
        facts["num_experts"] == 168
        and facts["exchange_buffer"] != facts_for(profile, profile.role(None), None, [])[0]["exchange_buffer"]
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "refused"),
    [
        (["--profile", PROFILE], {}, True),
        (["--profile", PROFILE], {"VLLM_API_KEY": "k"}, False),
        (["--profile", PROFILE, "--open"], {}, False),
        (["--profile", PROFILE, "--host", "127.0.0.1"], {}, False),
        (["--profile", PROFILE, "--", "--api-key", "k"], {}, False),
        (["--profile", PROFILE, "--", "--host", "::"], {}, True),
        (["--profile", "a3-single-w4a8-sglang"], {}, True),
        (["--profile", "cpu"], {}, False),
        ([], {}, False),
        (["--host", "0.0.0.0"], {}, True),
        (["--host", "0.0.0.0", "--open"], {}, False),
    ],
)
def test_a_server_that_would_answer_anyone_is_refused(
    arguments: list[str], environ: dict[str, str], refused: bool, tiny_w4a8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    dry = in_process("serve", tiny_w4a8, *arguments[:separator], "--dry-run", *arguments[separator:])
    assert dry.returncode == 0 and ("would answer anyone" in dry.stderr) is refused, dry.stderr
    if refused:
        assert_one_clear_line(in_process("serve", tiny_w4a8, *arguments), 2, "would answer anyone")


def test_what_follows_the_dashes_is_the_engines() -> None:
    done = in_process("doctor", "--profile", PROFILE, "--", "--max-num-seqs", "8")
    assert "--max-num-seqs" not in done.stderr and "rules checked" in done.stdout.replace("\n", " ")
