"""glm5_ascend/serve/README.md, "Chat with it": its commands print what the comments say."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys

import pytest

from tests.serve.support.chat import API_KEY
from tests.support.command import said
from tests.support.documents import blocks, document, section

pytestmark = pytest.mark.server
for module in ("vllm", "openai", "anthropic"):
    pytest.importorskip(module)

SECTION = section(document("glm5_ascend/serve/README.md"), "Chat with it")
BLOCKS = [block.text for block in blocks(SECTION)]
SHELL = re.compile(r"(glm5-ascend|curl) ")
PYTHON = "\n".join(block for block in BLOCKS if not SHELL.match(block))


@pytest.fixture(scope="module")
def port(server: str) -> str:
    """The port of the shared server, which is started with the flags of the section's first line."""
    words = shlex.split(BLOCKS[0])
    assert words[:6] == ["glm5-ascend", "serve", "work/glm5-w4a8", "--", "--api-key", API_KEY]
    assert json.loads(words[7]) == {"method": "mtp", "num_speculative_tokens": 3}
    return server.rpartition(":")[2]


def promised(source: str) -> list[str]:
    """The comments after print(...)."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", source, re.MULTILINE)


def test_every_block_is_run() -> None:
    shell = [block for block in BLOCKS if SHELL.match(block)]
    calls = (node for node in ast.walk(ast.parse(PYTHON)) if isinstance(node, ast.Call))
    prints = [call for call in calls if ast.unparse(call.func) == "print"]
    assert len(shell) == 2 and len(promised(PYTHON)) == len(prints)


@pytest.fixture(scope="module")
def printed(port: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines that all Python of the section prints."""
    script = tmp_path_factory.mktemp("script") / "readme.py"
    script.write_text(PYTHON.replace("8000", port), encoding="utf-8")
    return said(sys.executable, script).splitlines()


def test_python_prints_what_its_comments_say(printed: list[str]) -> None:
    assert printed == promised(PYTHON)


def test_shell(port: str, printed: list[str]) -> None:
    """The first command shows the drafts of earlier answers; the second needs the key."""
    (block,) = (block for block in BLOCKS[1:] if SHELL.match(block))
    metrics, models = block.replace("8000", port).strip().splitlines()
    shown = said("bash", "-c", metrics)
    numbers = {
        line.split("{")[0].split(":")[1]: float(line.split()[-1]) for line in shown.splitlines() if line[0] != "#"
    }
    assert 0 < numbers["spec_decode_num_accepted_tokens_total"] < numbers["spec_decode_num_draft_tokens_total"]
    assert '"id":"glm-5"' in said("bash", "-c", models)
