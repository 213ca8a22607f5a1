"""Containers and odd homes: nothing can be written but one folder, and the user has no home."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.command import ROOT, environment, ran
from tests.support.server_process import free_port

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
#: Root without the right to ignore permissions, where nobody may not enter this interpreter's folders.
BARE_ROOT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]
#: The root file system read-only for this command alone; $1 is memory that can be written.
READ_ONLY = """
mount -o bind,remount,ro / && mount -t tmpfs -o mode=1777 tmpfs "$1" && cd / || exit 99
[ "$2" = shm ] || mount -o bind,remount,ro /dev/shm || exit 99
shift 2
exec "$@"
"""
UNKNOWN = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "PYTEST_CURRENT_TEST")


@functools.cache
def obstacle() -> str | None:
    """Why this machine cannot lock a command in; None if it can."""
    if os.geteuid() != 0:
        return "only root may make a mount namespace here"
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "unshare and setpriv (util-linux) are missing"
    return ran("unshare", "--mount", "sh", "-c", "mount -o bind,remount,ro /").stderr.strip() or None


@functools.cache
def user() -> tuple[str, ...]:
    start = f"{sys.executable} -c 'import torch, glm5_ascend'"
    for prefix in (NOBODY, BARE_ROOT):
        if ran(*prefix, "sh", "-c", start, cwd="/").returncode == 0:
            return tuple(prefix)
    raise RuntimeError("no other user can run this interpreter")


def locked(
    commands: Sequence[Sequence[object]], memory: Path, shared_memory: bool = True, redirect: str = "",
    script: Path | None = None, runner: str = f"{sys.executable} -m glm5_ascend", **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `glm5-ascend` command lines one after the other until one fails, or a script that calls it as $RUN.

    Args:
        memory: a folder that is writable (and empty) for them, the only one but for shared memory and /proc.
        redirect: of the shell, e.g. ">&-". runner: what to run instead of glm5-ascend.
    """
    lines = [" ".join([runner, *(f"'{word}'" for word in command), redirect]) for command in commands]
    env = {key: value for key, value in environment().items() if key not in UNKNOWN} | variables | {"RUN": runner}
    inner = ["sh", str(script)] if script else ["sh", "-c", " && ".join(lines)]
    shm = "shm" if shared_memory else "-"
    return ran("unshare", "--mount", "sh", "-c", READ_ONLY, "sh", memory, shm, *user(), *inner, env=env, cwd=ROOT)


pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


@pytest.fixture
def memory() -> Iterator[Path]:
    """The mount point of what can be written, which everyone can enter.

    A short path: a socket's has 107 characters at most, and a table's cell is not taken apart.
    """
    with tempfile.TemporaryDirectory(prefix="g5-") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "m").mkdir()
        yield Path(folder) / "m"


@pytest.fixture
def source(tiny_source: Path) -> Path:
    for path in (tiny_source, *tiny_source.parents):
        if path.name.startswith(("pytest-", "tiny", "source")):
            path.chmod(0o755)
    return tiny_source


def test_quantize_verify_and_dry_run(memory: Path, source: Path) -> None:
    out = memory / "quantized"
    quantize = ["quantize", source, out, "--recipe", "rtn-w4a8"]
    commands = [["--version"], quantize, ["verify", out], ["serve", out, "--dry-run"]]
    done = locked(commands, memory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "ok: 0 errors" in done.stdout and "vllm_command serve" in done.stdout


@pytest.mark.long
def test_nothing_but_the_output_is_written(memory: Path, source: Path) -> None:
    """Neither a temporary folder nor shared memory: TMPDIR is the read-only root's."""
    done = locked([["quantize", source, memory / "quantized"]], memory, shared_memory=False, TMPDIR="/usr")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_narrow_plain_and_closed(memory: Path, source: Path) -> None:
    """LC_ALL=C, 20 columns, stdout closed: no traceback, and the exit codes stay."""
    out = memory / "quantized"
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "20"}
    commands = [["quantize", source, out], ["verify", out], ["deploy", "list"], ["--help"], ["serve", out, "--dry-run"]]
    for redirect in ("", ">&-"):
        done = locked(commands, memory, redirect=redirect, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.server
def test_serve_answers_from_a_read_only_root(memory: Path, tmp_path: Path) -> None:
    """A whole server: it comes up, answers, and the smoke test of a second command passes against it."""
    port = free_port()
    demo, out = memory / "demo", memory / "quantized"
    script = tmp_path / "serve.sh"
    script.write_text(
        f"set -e\ncd {memory}\n$RUN demo-model {demo}\n$RUN quantize {demo} {out}\n"
        f"$RUN serve {out} --port {port} > {memory}/log 2>&1 & server=$!\n"
        f"for i in $(seq 400); do sleep 1; kill -0 $server || {{ tail -40 {memory}/log >&2; exit 1; }}; "
        f"{sys.executable} -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:{port}/health\")' 2>/dev/null "
        f"&& break; done\n"
        f"$RUN smoke http://127.0.0.1:{port} && code=0 || code=$?\n"
        "kill $server; wait $server || true; exit $code\n"
    )
    script.chmod(0o755)
    done = locked([], memory, script=script, TMPDIR=str(memory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "canary answers" in done.stdout
