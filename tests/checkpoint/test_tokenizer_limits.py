"""Tokenizers and chat templates that grow or compute without end: one line, and the command lives on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from glm5_ascend.checkpoint import tokenizer as limits
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.errors import CheckpointError, TextError
from tests.support.command import environment, glm5_ascend, interruptible, ran
from tests.support.server_process import wait_for
from tests.support.tiny_model import change_json, edited_json

CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_source, tmp_path / "source"))


def with_normalizers(source: Path, *normalizers: dict[str, object]) -> SourceTokenizer:
    change_json(source / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": list(normalizers)})
    return SourceTokenizer(source)


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
#: Looks at the rest of the text from each of its letters.
COMPUTES = {"type": "Replace", "pattern": {"Regex": "a*[^a]"}, "content": "b"}
#: Backtracks 2^n ways on n letters and another one behind them: the library gives up by a panic.
PANICS = {"type": "Replace", "pattern": {"Regex": "(a|a)+$"}, "content": "b"}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
LOOPS += "{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
TIMES = "{{ ('a' * 3000000000) | length }}"
ESCAPES = "{{ messages.__class__.__base__.__subclasses__() }}"
ENDLESS = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"


def test_a_normalizer_that_grows_is_not_loaded(source: Path) -> None:
    assert with_normalizers(source, GROWS | {"content": "a" * 60}).encode("aaaa")
    with pytest.raises(CheckpointError, match="can make a text 1000000 times as long"):
        with_normalizers(source, *[GROWS] * 2).encode("b")


def test_an_added_token_without_end_is_not_loaded(source: Path) -> None:
    with edited_json(source / "tokenizer.json") as tokenizer:
        tokenizer["added_tokens"][0]["content"] = "a" * 100_000
    with pytest.raises(CheckpointError, match="an added token has 100000 characters"):
        SourceTokenizer(source).render(CHAT, None)


def test_a_normalizer_that_computes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CPU_SECONDS", 1)
    with pytest.raises(CheckpointError, match="computed for 1 s without an answer"):
        with_normalizers(source, *[COMPUTES] * 20).encode("a" * 20_000)


def test_a_panic(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TextError, match=r"refuses a text: .*retry-limit"):
        with_normalizers(source, PANICS).encode("a" * 60 + "c")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("template", "says"), [(LOOPS, "computed for"), (DOUBLES, "needs"), (TIMES, "needs"), (ENDLESS, "recursion"),
                           (ESCAPES, "unsafe")],
)  # fmt: skip
def test_templates(template: str, says: str, source: Path) -> None:
    """In a process of its own, as a template that loops stays in the process that has given it up."""
    (source / "chat_template.jinja").write_text(template)
    code = (
        "import sys; from pathlib import Path; from glm5_ascend.checkpoint import tokenizer\n"
        "tokenizer.MEMORY_BYTES = 2**29\n"
        f"tokenizer.SourceTokenizer(Path(sys.argv[1])).render({CHAT!r}, None)"
    )
    done = ran(sys.executable, "-c", code, source)
    assert says in done.stderr.splitlines()[-1] and "glm5_ascend.errors" in done.stderr.splitlines()[-1], done.stderr


def test_the_command_says_one_line(source: Path, tmp_path: Path) -> None:
    with_normalizers(source, PANICS)
    (tmp_path / "calib.txt").write_text("a" * 60 + "c")
    done = glm5_ascend("quantize", source, tmp_path / "out", "--calib", tmp_path / "calib.txt")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the tokenizer refuses a text" in done.stderr and not (tmp_path / "out").exists()


def test_a_signal_while_it_computes(source: Path, tmp_path: Path) -> None:
    with_normalizers(source, *[COMPUTES] * 20)
    (tmp_path / "calib.txt").write_text("a" * 60_000)
    command = [sys.executable, "-m", "glm5_ascend", "quantize", str(source), str(tmp_path / "out")]
    run = interruptible(
        [*command, "--calib", str(tmp_path / "calib.txt")], stderr=subprocess.PIPE, text=True, env=environment()
    )
    process = psutil.Process(run.pid)
    wait_for(lambda: process.num_threads() > 1 and process.cpu_times().user > 5, "the tokenizer", 120)
    os.kill(run.pid, signal.SIGTERM)
    _, stderr = run.communicate(timeout=300)
    assert run.returncode == 130 and "interrupted" in stderr and "Traceback" not in stderr
