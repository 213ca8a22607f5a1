"""Containers and odd homes: nothing can be written but one folder, and the user has no home."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.support.locked import locked, obstacle
from tests.support.server_process import free_port

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
    pytest.importorskip("vllm")
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
