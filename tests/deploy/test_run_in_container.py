"""deploy/run-in-container.sh prints the docker command for the machine; shellcheck reads the script."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from glm5_ascend.deploy.rendering.context import MANAGERS, MOUNTS
from glm5_ascend.engine_lines import STABLE
from tests.support.command import ROOT

SCRIPT = ROOT / "deploy/run-in-container.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_the_command_has_image_devices_and_mounts() -> None:
    done = run("--models", "/data/my models", "--dry-run")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:2] == ["docker", "run"] and words[-2:] == [STABLE.image("a3"), "bash"]
    devices = {words[i + 1] for i, word in enumerate(words) if word == "--device"}
    assert {"/dev/davinci0", *MANAGERS} <= devices
    mounts = {words[i + 1] for i, word in enumerate(words) if word == "-v"}
    assert mounts == {f"{path}:{path}:ro" for path in MOUNTS} | {
        "/data/my models:/data/my models",
        f"{ROOT}:/glm5-ascend",
    }


def test_image_and_command_are_the_users() -> None:
    assert shlex.split(run("--dry-run", "--image", "a:1", "npu-smi", "info").stdout)[-3:] == ["a:1", "npu-smi", "info"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modles", "/m"], "unknown option"),
        (["--image"], "needs a value"),
        (["--models", "m"], "not an absolute path"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments, "--dry-run") if arguments != ["--image"] else run(*arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
