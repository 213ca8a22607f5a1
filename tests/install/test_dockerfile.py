"""deploy/Dockerfile: its promises by reading it, and its steps carried out in a folder where that is possible."""

from __future__ import annotations

import os
import re
import shlex
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
    assert made.entrypoint[2].endswith('exec glm5-ascend "$@"') and made.env["NUMBA_CACHE_DIR"].startswith("/tmp/")
    known = {"FROM", "ARG", "COPY", "RUN", "ENV", "USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions(TEXT)} <= known


def test_copied_files_exist() -> None:
    for name, rest in instructions(TEXT):
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert source == "dist/glm5_ascend-*.whl" or (ROOT / source).is_file()


STEPS = """
set -e
glm5-ascend demo-model /tmp/demo
glm5-ascend quantize /tmp/demo /tmp/w4a8 --quiet
glm5-ascend verify /tmp/w4a8 --against /tmp/demo
glm5-ascend doctor
"""
#: The server as the image starts it, asked by the image's own HEALTHCHECK; its exit code counts.
SERVER = """
glm5-ascend serve /tmp/w4a8 & server=$!
trap 'kill $server 2> /dev/null || true' EXIT
until {healthcheck} 2> /tmp/health.err; do kill -0 $server || exit 9; sleep 2; done
glm5-ascend smoke http://127.0.0.1:8000
kill $server
wait $server || test $? = 130
"""


@pytest.mark.contract
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get brings debootstrap")
def test_steps_in_a_clean_root_folder(tmp_path: Path) -> None:
    """Built from a wheel, then run as its user with a read-only root: quantize, verify, doctor, serve, smoke.

    Downloads and unpacks 3 GB. ROOT_FOLDER names a folder to keep it in.
    """
    tools, context = tmp_path / "tools", tmp_path / "context"
    for folder in (tools, context):
        folder.mkdir()
    shutil.copytree(ROOT / "deploy", context / "deploy")
    wheel = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(context / "dist"), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *wheel], check=True)
    root = RootFolder(Path(os.environ.get("ROOT_FOLDER", tmp_path / "root")))
    if not root.folder.exists():
        root.base(tools)
    root.build(TEXT, context)
    made = image(TEXT)
    steps = STEPS + SERVER.format(healthcheck=shlex.join(made.healthcheck))
    said = root.run(["/bin/sh", "-c", steps], made.env, made.user, locked=True)
    assert "ok: 0 errors, 0 warnings" in said
    assert "ready: http://127.0.0.1:8000/v1" in said and re.search(r"^ok: \d of \d checks passed", said, re.MULTILINE)
