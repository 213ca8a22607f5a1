"""`glm5-ascend serve DIR --profile NAME` as a user's shell runs it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_ascend.deploy.diagnosis.doctor import checkpoint_rows
from glm5_ascend.deploy.profiles.command import verify_name
from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.deploy.rules.preflight import quick_check
from glm5_ascend.deploy.server import checked_command
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.errors import CheckFailedError
from glm5_ascend.serve import cores
from glm5_ascend.serve.flags import value_of
from glm5_ascend.serve.local_server import free_port
from glm5_ascend.serve.options import ServeOptions
from glm5_ascend.serve.servable import check_directory
from tests.support.command import assert_one_clear_line, in_process, said
from tests.support.tiny_model import quantize_with_rot_in_shard

pytestmark = pytest.mark.usefixtures("clean_environment")


def serve(*arguments: object) -> subprocess.CompletedProcess[str]:
    return in_process("serve", *arguments)


@pytest.fixture(scope="module")
def checkpoints(tiny_quantized) -> dict[str, Path]:  # type: ignore[no-untyped-def]
    recipes = {load(name).weights["recipe"] for name in names()} - {"any"}
    return {recipe: tiny_quantized(recipe) for recipe in recipes}


def argv_of(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.startswith(("#", "export "))]
    return shlex.split("\n".join(lines).replace("\\\n", ""))


@pytest.mark.parametrize("name", names())
def test_dry_run_prints_the_exact_command(name: str, checkpoints: dict[str, Path]) -> None:
    profile = load(name)
    recipe = profile.weights["recipe"]
    directory = checkpoints["w4a8" if recipe == "any" else recipe]
    role = next(iter(profile.roles.values()))
    where = ["--role", role.name, "--head", "10.0.0.1", "--ip", "10.0.0.1", "--nic", "eth0"]
    flag = "--max-running-requests" if profile.engine == SGLANG else "--max-num-seqs"
    done = serve(directory, "--profile", name, *where, "--dry-run", "--", flag, "2")
    assert done.returncode == 0, done.stderr
    argv = argv_of(done.stdout)
    if profile.platform == "cpu":
        assert argv[1:5] == ["-m", "glm5_ascend.serve.vllm_command", "serve", str(directory)]
    else:
        head = (
            ["python", "-m", "sglang.launch_server", "--model-path"] if profile.engine == SGLANG else ["vllm", "serve"]
        )
        assert argv[: len(head) + 1] == [*head, str(directory)]
    assert argv[-2:] == [flag, "2"]
    assert argv.count(flag) == 1 and value_of(argv, "--port") == str(role.port)
    ranks = int(role.args.get("tensor-parallel-size", 1))
    exported = {line.split("=")[0].removeprefix("export ") for line in done.stdout.splitlines() if "export" in line}
    added = set(cores.variables(ranks)) if profile.platform == "cpu" else {"VLLM_API_KEY"}
    assert exported == set(role.env) | added
    said("sh", "-n", input=done.stdout)


def test_the_users_environment_stays_and_is_said(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "1024")
    done = serve(checkpoints["w4a8"], "--profile", "a3-single-w4a8", "--dry-run")
    assert "export HCCL_BUFFSIZE=1024" in done.stdout
    assert "kept from your environment: HCCL_BUFFSIZE=1024 (the profile: 200)" in done.stderr


@pytest.mark.parametrize(
    ("recipe", "arguments", "code", "message"),
    [
        ("w4a8", ["--profile", "a3-singel-w4a8"], 2, "no profile 'a3-singel-w4a8'"),
        ("w4a8", ["--profile", "a3-single-w4a8-mlapo"], 2, "is for attention in W8A8,"),
        ("w8a8", ["--profile", "a3-single-w4a8"], 2, "is for experts in W4A8_DYNAMIC"),
        ("w4a8", ["--profile", "a3-single-w4a8", "--", "--port", "x"], 2, "--port is 'x', expected a whole number"),
        ("w4a8", ["--node", "1"], 2, "role server of cpu has nodes 0 to 0"),
        ("w8a8", ["--profile", "a3-single-w4a8-sglang"], 2, "is for experts in W4A8_DYNAMIC"),
        ("w4a8", ["--profile", "a3-single-w4a8-sglang", "--", "--moe-a2a-backend", "none"], 1, "bad combination (S1)"),
        ("w4a8", ["--profile", "a3-1m", "--", "--decode-context-parallel-size", "8"], 1, "known bad combination (P13)"),
    ],
)
def test_what_cannot_be_is_refused(
    checkpoints: dict[str, Path], recipe: str, arguments: list[str], code: int, message: str
) -> None:
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    done = serve(checkpoints[recipe], *arguments[:separator], "--dry-run", *arguments[separator:])
    assert done.returncode == code and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "fix:" in done.stderr


@pytest.mark.parametrize(
    ("profile", "needs"), [("a3-single-w4a8", "vllm-ascend"), ("a3-single-w4a8-sglang", "SGLang and torch_npu")]
)
def test_without_its_engine_nothing_starts(profile: str, needs: str, checkpoints: dict[str, Path]) -> None:
    done = serve(checkpoints["w4a8"], "--profile", profile, "--open")
    assert_one_clear_line(done, 3, f"needs {needs}")
    assert "--dry-run" in done.stderr


def test_a_rotation_in_a_shard_is_refused_for_sglang_alone(tiny_source: Path, tmp_path: Path) -> None:
    """vLLM finds the tensor by the index."""
    checkpoint = check_directory(quantize_with_rot_in_shard(tiny_source, tmp_path / "old"))
    for profile in ("a3-single-w4a8", "cpu"):
        assert not quick_check(checkpoint.directory, verify_name(load(profile).engine, load(profile).platform))
        assert [row.status for row in checkpoint_rows(checkpoint, load(profile))] == ["ok"]
    with pytest.raises(CheckFailedError, match="broken checkpoint"):
        checked_command(ServeOptions(checkpoint.directory, profile="a3-single-w4a8-sglang", dry_run=True))
    rows = checkpoint_rows(checkpoint, load("a3-single-w4a8-sglang"))
    assert "problem" in {row.status for row in rows} and "quantize again" in " ".join(row.value for row in rows)


def test_with_sglang_its_server_is_started(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two empty packages of these names are enough to be let through."""
    for name in ("sglang", "torch_npu"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--port", str(free_port()), "--api-key", "secret"]
    built = checked_command(ServeOptions(checkpoints["w4a8"], flags, profile="a3-single-w4a8-sglang"))
    assert built.argv[:3] == [sys.executable, "-m", "sglang.launch_server"] and built.argv[-1] == "secret"
    assert "secret" not in built.shown and "--api-key '***'" in built.shown
    assert "VLLM_API_KEY" not in built.env
