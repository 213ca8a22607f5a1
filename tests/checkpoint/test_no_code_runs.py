"""Code that a checkpoint brings is never run, whatever standard input answers, and never copied."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.output import copy_serving_files
from tests.support.command import environment, ran
from tests.support.tiny_model import change_json

TEXTS = """
import sys
from pathlib import Path
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.errors import Glm5Error
tokenizer = SourceTokenizer(Path(sys.argv[1]))
for use in (lambda: tokenizer.encode("a"),
            lambda: tokenizer.render([{"role": "user", "content": "a"}], None)):
    try:
        use()
    except Glm5Error as error:
        print(error.message)
"""


@pytest.fixture
def trap(tiny_source: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer class is code beside it, which leaves a mark where it runs."""
    source = tmp_path / "source"
    shutil.copytree(tiny_source, source)
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast as Trap\n"
    for name in ("tokenization_trap.py", "tokenizer_trap.py"):
        (source / name).write_text(code)
    found_by = {"AutoTokenizer": ["tokenization_trap.Trap"] * 2}
    change_json(source / "tokenizer_config.json", tokenizer_class="Trap", auto_map=found_by)
    return source


def answered_yes(tmp_path: Path, *arguments: str | Path) -> str:
    variables = environment(HF_HOME=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    done = ran(sys.executable, *arguments, env=variables, input="y\n" * 9)
    assert "Traceback" not in done.stderr, done.stderr
    assert "[y/N]" not in done.stdout + done.stderr
    return done.stdout


def test_the_tokenizer_neither_asks_nor_runs_it(trap: Path, tmp_path: Path) -> None:
    answered_yes(tmp_path, "-c", TEXTS, trap)
    assert not (tmp_path / "ran").exists()


def test_python_files_are_not_copied(trap: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    copy_serving_files(trap, json.loads((trap / "config.json").read_text()), out)
    assert (out / "tokenizer.json").is_file() and not list(out.rglob("*.py"))
