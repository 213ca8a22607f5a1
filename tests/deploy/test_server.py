"""The command that `glm5-ascend serve DIR` runs on a CPU, and its checks before the start."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.deploy import serve, server
from glm5_ascend.errors import CheckpointError, ConfigError, Glm5Error, MissingEnvironmentError
from glm5_ascend.files import cgroups
from glm5_ascend.serve import cores, servable
from glm5_ascend.serve.flags import value_of
from tests.support.command import in_process
from tests.support.tiny_model import SHARD, tiny_config, write_tiny_model

CONFIG = tiny_config(max_position_embeddings=202752)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return write_tiny_model(tmp_path, max_position_embeddings=202752)


def build_command(directory: Path, extra: list[str]) -> tuple[dict[str, str], list[str]]:
    built = serve(directory, extra, dry_run=True, skip_verify=True)
    return built.env, built.argv


def test_a_damaged_shard_is_named(directory: Path) -> None:
    shard = directory / SHARD
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated: 0 bytes") as error:
        serve(directory, dry_run=True)
    assert str(shard) in error.value.message


def test_defaults(directory: Path) -> None:
    _, argv = build_command(directory, [])
    assert argv[:5] == [sys.executable, "-m", "glm5_ascend.serve.vllm_command", "serve", str(directory)]
    expected = {"--host": "127.0.0.1", "--port": "8000", "--max-model-len": "202752"}
    assert {flag: value_of(argv, flag) for flag in expected} == expected
    assert "--enable-prefix-caching" in argv and "--quantization" not in argv


@pytest.mark.parametrize(
    ("template", "parsers"),
    [
        ("{{ messages[0].content }}", []),
        ("<think>{{ messages[0].content }}", ["--reasoning-parser"]),
        ("<think><tool_call>{{ messages }}", ["--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"]),
    ],
)
def test_parsers_follow_the_template(template: str, parsers: list[str], directory: Path) -> None:
    """A model that never thinks: with the parser of thoughts its answers would all be empty."""
    (directory / "chat_template.jinja").write_text(template)
    argv = build_command(directory, [])[1]
    every = ("--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice")
    assert [flag for flag in every if flag in argv] == parsers


def test_a_quantized_checkpoint_is_served_as_one(tiny_w4a8: Path) -> None:
    assert value_of(build_command(tiny_w4a8, [])[1], "--quantization") == "ascend"
    assert build_command(tiny_w4a8, ["-q", "ascend"])[1].count("--quantization") == 1


@pytest.mark.parametrize("extra", [["--max-model-len", "64"], ["--max_model_len", "64"], ["--max_model_len=64"]])
def test_the_users_flag_replaces_ours(directory: Path, extra: list[str]) -> None:
    _, argv = build_command(directory, [*extra, "--no-enable-auto-tool-choice"])
    assert argv[-3:] == ["--max-model-len", "64", "--no-enable-auto-tool-choice"]
    assert "202752" not in argv and "--enable-auto-tool-choice" not in argv


def test_the_users_environment_is_not_overwritten(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for user, expected in (("3", "3"), ("", "2")):
        monkeypatch.setenv("OMP_NUM_THREADS", user) if user else monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setattr(cores, "physical_cores", lambda: [0, 4])
        env, argv = build_command(directory, [])
        assert env.get("OMP_NUM_THREADS") == expected and env["HF_HUB_OFFLINE"] == "1"
        assert "VLLM_CPU_KVCACHE_SPACE" not in env and "--kv-cache-memory-bytes" not in argv


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("allowed", "quotas", "expected"),
    [
        ({0, 1, 2, 3, 4, 5, 6, 7}, [None], [0, 1, 2, 3]),  # cpu and cpu + 4 are one core
        ({1, 5, 6}, [None], [1, 6]),
        ({0, 1, 2, 3}, [None, 250_000], [0, 1]),
        ({0, 1, 2, 3}, [350_000, 120_000], [0]),
        ({2}, [50_000], [2]),
    ],
)
def test_one_cpu_of_each_core_within_the_quota(
    allowed: set[int], quotas: list[int | None], expected: list[int], version: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for cpu in range(8):
        folder = tmp_path / "topology" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    group, path = tmp_path / ("cpu" if version == 1 else ""), "/".join(f"g{i}" for i in range(len(quotas)))
    for number, quota in enumerate(quotas):
        group /= f"g{number}"
        group.mkdir(parents=True)
        (group / "cpu.max").write_text(f"{quota or 'max'} 100000\n")
        (group / "cpu.cfs_quota_us").write_text(f"{quota or -1}\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "own").write_text(f"4:memory:/x\n{'3:cpu,cpuacct' if version == 1 else '0:'}:/{path}\n")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path / "topology")
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores.physical_cores() == expected
    assert cores.thread_groups(1) == ",".join(map(str, expected))


def test_cores_are_split_among_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "physical_cores", lambda: [0, 1, 4, 5])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores.thread_groups(2) == "0,1|4,5" and cores.thread_groups(4) == "0|1|4|5"
    with pytest.raises(ConfigError, match="5 ranks of tensor parallel on 4 cores"):
        cores.refuse_ranks_without_core(5)
    for cpu in (0, 1, 4, 5):  # as some machines number them
        (tmp_path / f"cpu{cpu}" / f"node{cpu % 2}").mkdir(parents=True)
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path)
    assert cores.thread_groups(2) == "0,4|1,5"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cores.thread_groups(2) == "0|1"


def test_ranks_are_bound_to_their_cores(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cores.BIND, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "physical_cores", lambda: [0, 1, 2, 3])
    assert build_command(directory, ["--tensor-parallel-size", "2"])[0][cores.BIND] == "0,1|2,3"
    assert cores.BIND not in build_command(directory, [])[0]
    monkeypatch.setenv(cores.BIND, "auto")
    assert cores.BIND not in build_command(directory, ["-tp", "2"])[0]


def test_dry_run_as_a_shell_command_as_json_and_as_a_function(directory: Path) -> None:
    words = ("serve", directory, "--port", "8123", "--dry-run")
    line = in_process(*words, "--", "--seed", "1").stdout
    assert "--port 8123" in line and line.rstrip().endswith("--seed 1")
    report = json.loads(in_process(*words, "--json", "--", "--seed", "1").stdout)
    assert report == serve(str(directory), ["--seed", "1"], port=8123, dry_run=True).to_dict()
    assert report["argv"][-2:] == ["--seed", "1"] and report["env"]["HF_HUB_OFFLINE"] == "1" and report["ok"] is True
    assert in_process("serve", directory, "--json").returncode == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"architectures": None}, "architectures is None"),
        ({"scoring_func": None}, "scoring_func is"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
        (
            {"indexer_types": ["full", "full", "full"], "index_topk_freq": 4},
            "layers \\[2\\] have or skip an indexer by indexer_types, but not by index_topk_freq 4",
        ),
        (
            {"indexer_types": ["full", "shared", "full"], "index_topk_pattern": "FFF"},
            "layers \\[1\\] have or skip an indexer by indexer_types",
        ),
    ],
)
def test_configs_that_vllm_would_misread_are_refused(directory: Path, change: dict[str, Any], message: str) -> None:
    config = CONFIG | change
    without = {key: value for key, value in config.items() if value is not None}  # null, and missing
    for written in (config, without):
        (directory / "config.json").write_text(json.dumps(written))
        with pytest.raises(Glm5Error, match=message):
            build_command(directory, [])


def test_shared_indexers_by_indexer_types_alone_are_for_a_cpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our plugin reads them; vllm-ascend would run indexers that no file fills."""
    config = CONFIG | {"indexer_types": ["full", "shared", "full"]}
    (directory / "config.json").write_text(json.dumps(config))
    assert build_command(directory, [])[1]
    monkeypatch.setattr(servable, "on_ascend", lambda: True)
    with pytest.raises(CheckpointError, match=r"layers \[1\] have or skip an indexer by indexer_types"):
        build_command(directory, [])


def test_directories_without_a_checkpoint(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        build_command(tmp_path / "nowhere", [])
    (directory / "quant_model_description.json").write_text("{}")
    (directory / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {}}))
    with pytest.raises(CheckpointError, match="would never open"):
        build_command(directory, [])
    (directory / SHARD).unlink()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"has no \.safetensors"):
        build_command(directory, [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor_parallel_size=3"], r"size 3: num_attention_heads 2 of config.json does not divide into 3 equal"),
        (["-tp", "2"], "2 ranks of tensor parallel on 1 core$"),
        (["-tp", "two"], "--tensor-parallel-size"),
        (["-dp", "2"], "--data-parallel-size is not implemented for the CPU"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size is not implemented for the CPU"),
        (["-tp", "2", "-dcp", "2"], "--decode-context-parallel-size is not implemented for the CPU"),
        (["-tp", "2", "--enable-expert-parallel"], "--enable-expert-parallel is not implemented for the CPU"),
    ],
)
def test_ranks_that_cannot_be(flags: list[str], message: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "require_cpu_environment", lambda: None)
    monkeypatch.setattr(server.os, "execvpe", lambda *_: pytest.fail("must not start"))
    monkeypatch.setattr(cores, "physical_cores", lambda: [0])
    with pytest.raises(ConfigError, match=message) as caught:
        serve(directory, flags)
    assert caught.value.exit_code == 2


def test_a_port_in_use_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "require_cpu_environment", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(directory, port=port)


def test_a_bad_environment_stops_the_server(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.os, "execvpe", lambda *_: pytest.fail("must not start"))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setattr(server, "on_ascend", lambda: False)
    with pytest.raises(MissingEnvironmentError) as caught:
        serve(directory)
    assert caught.value.exit_code == 3 and caught.value.tip
