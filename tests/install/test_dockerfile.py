"""deploy/Dockerfile: its promises by reading it, and its steps carried out in a folder where that is possible."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.support.dockerfile import RootFolder, image, instructions
from tests.install.support.locked import obstacle
from tests.support.command import ROOT

TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def test_promises() -> None:
    """Another user than root, a pinned base, a health check, arguments that no shell takes apart."""
    made = image(TEXT)
    assert made.user.split(":")[0] not in ("", "0", "root") and made.user.replace(":", "").isdigit()
    assert ":" in made.base and not made.base.endswith(":latest")
    assert made.healthcheck[0] == "python" and "/health" in made.healthcheck[-1]
    assert made.entrypoint == ["glm5-ascend"] and made.env["NUMBA_CACHE_DIR"].startswith("/opt/")
    known = {"FROM", "ARG", "COPY", "RUN", "ENV", "USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions(TEXT)} <= known


def test_copied_files_exist() -> None:
    for name, rest in instructions(TEXT):
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert source == "dist/glm5_ascend-*.whl" or (ROOT / source).is_file()


#: vLLM's engine needs more of a machine (shared memory, processors) than a plain root folder gives: a server is started
#: from a read-only root in test_locked_down.py, and by the image itself where a container tool has a daemon.
STEPS = """
set -e
glm5-ascend demo-model /tmp/demo
glm5-ascend quantize /tmp/demo /tmp/w4a8 --quiet
glm5-ascend verify /tmp/w4a8 --against /tmp/demo
glm5-ascend serve /tmp/w4a8 --dry-run
glm5-ascend doctor
"""


@pytest.mark.contract
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get brings debootstrap")
def test_steps_in_a_clean_root_folder(tmp_path: Path) -> None:
    """Built from a wheel, then run as its user with a read-only root: quantize, verify, the server's command, doctor.

    Downloads and unpacks 3 GB. ROOT_FOLDER names a folder to keep it in.
    """
    tools, context = tmp_path / "tools", tmp_path / "context"
    for folder in (tools, context):
        folder.mkdir()
    shutil.copytree(ROOT / "deploy", context / "deploy")
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(context / "dist"),
        str(ROOT),
    ]
    subprocess.run(wheel, check=True)
    root = RootFolder(Path(os.environ.get("ROOT_FOLDER", tmp_path / "root")))
    if not root.folder.exists():
        root.base(tools)
    root.build(TEXT, context)
    made = image(TEXT)
    said = root.run(["/bin/sh", "-c", STEPS], made.env, made.user, locked=True)
    assert "ok: 0 errors, 0 warnings" in said and "vllm" in said
