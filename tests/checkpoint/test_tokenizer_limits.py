"""Tokenizers and chat templates that grow or compute without end: one line, and the command lives on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from glm5_ascend.checkpoint import tokenizer_process
from glm5_ascend.checkpoint.tokenizer_process import SourceTokenizer
from glm5_ascend.errors import CheckpointError, TextError
from tests.support.command import environment, glm5_ascend, interruptible

CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_source, tmp_path / "source"))


def with_normalizers(source: Path, *normalizers: dict[str, object]) -> SourceTokenizer:
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    path.write_text(json.dumps(tokenizer | {"normalizer": {"type": "Sequence", "normalizers": list(normalizers)}}))
    return SourceTokenizer(source)


def with_template(source: Path, template: str) -> SourceTokenizer:
    (source / "chat_template.jinja").write_text(template)
    return SourceTokenizer(source)


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
#: Looks at the rest of the text from each of its letters.
COMPUTES = {"type": "Replace", "pattern": {"Regex": "a*[^a]"}, "content": "b"}
#: Backtracks 2^n ways on n letters and another one behind them: the library gives up by a panic.
PANICS = {"type": "Replace", "pattern": {"Regex": "(a|a)+$"}, "content": "b"}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
LOOPS += "{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
ESCAPES = "{{ messages.__class__.__base__.__subclasses__() }}"
ENDLESS = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"


def test_a_normalizer_that_grows(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "MEMORY_BYTES", 2**30)
    tokenizer = with_normalizers(source, *[GROWS] * 4)
    assert tokenizer.encode("b")
    with pytest.raises(CheckpointError, match="needs more than 1 GiB of memory"):
        tokenizer.encode("aaaa")
    assert tokenizer.encode("b")  # another process


def test_a_normalizer_that_computes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "CPU_SECONDS", 1)
    with pytest.raises(CheckpointError, match="computed for 1 s without an answer"):
        with_normalizers(source, *[COMPUTES] * 20).encode("a" * 60_000)


def test_a_panic(source: Path) -> None:
    with pytest.raises(TextError, match=r"refuses a text: .*retry-limit"):
        with_normalizers(source, PANICS).encode("a" * 60 + "c")


def test_an_answer_without_end(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "ANSWER_BYTES", 1000)
    with pytest.raises(CheckpointError, match="gives more than 0 MiB for one text"):
        SourceTokenizer(source).encode("word " * 1000)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        pytest.param(LOOPS, "computed for 20 s", marks=pytest.mark.long),
        pytest.param(DOUBLES, "needs more than 3 GiB of memory", marks=pytest.mark.long),
        (ENDLESS, "recursion"),
        (ESCAPES, "unsafe"),
    ],
)
def test_templates(source: Path, template: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "CPU_SECONDS", 20)  # transformers' import is part of it
    monkeypatch.setattr(tokenizer_process, "MEMORY_BYTES", 3 * 2**30)
    with pytest.raises((CheckpointError, TextError), match=says):
        with_template(source, template).render(CHAT, None)


def test_the_command_says_one_line(source: Path, tmp_path: Path) -> None:
    with_normalizers(source, PANICS)
    (tmp_path / "calib.txt").write_text("a" * 60 + "c")
    done = glm5_ascend("quantize", source, tmp_path / "out", "--calib", tmp_path / "calib.txt")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the tokenizer refuses a text" in done.stderr and not (tmp_path / "out").exists()


def eventually(true: Callable[[], bool]) -> bool:
    """No verdict on speed: it ends what hangs."""
    for _ in range(1200):
        if true():
            return True
        time.sleep(0.1)
    return False


def test_a_signal_while_it_computes(source: Path, tmp_path: Path) -> None:
    with_normalizers(source, *[COMPUTES] * 20)
    (tmp_path / "calib.txt").write_text("a" * 60_000)
    command = [sys.executable, "-m", "glm5_ascend", "quantize", str(source), str(tmp_path / "out")]
    run = interruptible(
        [*command, "--calib", str(tmp_path / "calib.txt")], stderr=subprocess.PIPE, text=True, env=environment()
    )
    parent, children = psutil.Process(run.pid), list[psutil.Process]()

    def computes() -> bool:
        children[:] = [child for child in parent.children() if "tokenizer_child" in " ".join(child.cmdline())]
        return bool(children) and children[0].cpu_times().user > 1

    assert eventually(computes)
    os.kill(run.pid, signal.SIGTERM)
    _, stderr = run.communicate(timeout=300)
    assert run.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
    assert eventually(lambda: not children[0].is_running())
