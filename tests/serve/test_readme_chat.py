"""glm5_ascend/serve/README.md, "Chat with it", as it stands: server and commands, whose output is in the comments."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5_ascend.serve.local_server import free_port
from tests.support.command import TIMEOUT_S
from tests.support.documents import blocks, document, section
from tests.support.server_process import running

pytestmark = pytest.mark.server
for module in ("vllm", "openai", "anthropic"):
    pytest.importorskip(module)

SECTION = section(document("glm5_ascend/serve/README.md"), "Chat with it")
BLOCKS = [block.text for block in blocks(SECTION)]
SHELL = re.compile(r"(glm5-ascend|curl) ")
PYTHON = "\n".join(block for block in BLOCKS if not SHELL.match(block))


@pytest.fixture(scope="module")
def port(rotated_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The server of the section's first line, on a free port instead of 8000, in a folder with its work/glm5-w4a8."""
    folder, found = tmp_path_factory.mktemp("readme"), free_port()
    (folder / "work").mkdir()
    (folder / "work/glm5-w4a8").symlink_to(rotated_checkpoint)
    words = shlex.split(BLOCKS[0])
    assert words[:3] == ["glm5-ascend", "serve", "work/glm5-w4a8"]
    program = [sys.executable, "-m", "glm5_ascend", *words[1:3], "--port", str(found), *words[3:]]
    with running(program, found, folder / "server.log", folder=folder):
        yield found


def promised(source: str) -> list[str]:
    """The comments behind print(...)."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", source, re.MULTILINE)


def test_every_block_is_run() -> None:
    shell = [block for block in BLOCKS if SHELL.match(block)]
    calls = (node for node in ast.walk(ast.parse(PYTHON)) if isinstance(node, ast.Call))
    prints = [call for call in calls if ast.unparse(call.func) == "print"]
    assert (len(BLOCKS), len(shell)) == (7, 2)
    assert len(promised(PYTHON)) == len(prints) == 7


@pytest.fixture(scope="module")
def printed(port: int, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines that all Python of the section prints."""
    script = tmp_path_factory.mktemp("script") / "readme.py"
    script.write_text(PYTHON.replace("8000", str(port)), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_python_prints_what_its_comments_say(printed: list[str]) -> None:
    assert printed == promised(PYTHON)


def test_shell(port: int, printed: list[str]) -> None:
    """The second command needs the key; the first counts the drafts of the answers before."""
    (block,) = (block for block in BLOCKS[1:] if SHELL.match(block))
    metrics, models = block.replace("8000", str(port)).strip().splitlines()
    done = subprocess.run(["bash", "-c", metrics], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    numbers = {
        line.split("{")[0].split(":")[1]: float(line.split()[-1]) for line in done.stdout.splitlines() if line[0] != "#"
    }
    assert 0 < numbers["spec_decode_num_accepted_tokens_total"] < numbers["spec_decode_num_draft_tokens_total"]
    done = subprocess.run(["bash", "-c", models], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert '"id":"glm-5"' in done.stdout
