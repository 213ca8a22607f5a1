"""The documents' commands for an Atlas run as they stand, with --dry-run where they would start vLLM or quantize."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.demo_model.resources import write_demo_model
from tests.support.documents import document, section, shell_lines

ATLAS = document("deploy/README.md")
QUICK = section(document("README.md"), "Quick start (Atlas A3)")
COMMAND = re.compile(r"(?:[A-Z0-9_]+=\S+ )?glm5-ascend ")


def commands(text: str) -> list[str]:
    return [line.split("  #")[0].split(" # ")[0].strip() for line in shell_lines(text) if COMMAND.match(line)]


LINES = commands(section(ATLAS, "On an Atlas") + section(ATLAS, "Production: several nodes"))


def names(lines: list[str]) -> set[str]:
    return {line.split("glm5-ascend ")[1].split()[0] for line in lines}


#: What needs a server, vllm-ascend's own code or an hour: tests/serve/test_smoke.py, tests/deploy/test_accept.py and
#: tests/contract/test_rehearse.py run them; tests/test_docs_commands.py has the parser read them.
ELSEWHERE = re.compile(r"glm5-ascend (smoke|accept|rehearse) |--rehearse")


def test_there_are_some() -> None:
    assert names(LINES) == {"accept", "deploy", "doctor", "rehearse", "serve", "smoke"}
    assert names(commands(QUICK)) == {"doctor", "quantize", "serve", "smoke"}


@pytest.mark.parametrize("line", [line for line in LINES + commands(QUICK) if not ELSEWHERE.search(line)])
def test_it_runs(
    line: str, tiny_quantized: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my-cluster.yaml").write_text("network: {nic: bond0}\n")
    for variable in line.partition("glm5-ascend ")[0].split():
        monkeypatch.setenv(*variable.split("=", 1))
    words = shlex.split(line.partition("glm5-ascend ")[2])
    places = {"work/glm5-w4a8": "w4a8", "work/glm5-w8a8": "w8a8", "DIR": "w4a8", "/models/glm5-w4a8": "w4a8"}
    if words[0] == "quantize":
        source, out = ("/models/GLM-5", "/models/glm5-w4a8")
        assert words[1:3] == [source, out]
        words[1:3] = [str(write_demo_model(tmp_path / "source")), str(tmp_path / "out")]
    words = [str(tiny_quantized(places[word])) if word in places else word for word in words]
    if words[0] == "serve" and "--dry-run" not in words:
        words.insert(2, "--dry-run")
    assert run(words) == 0
