"""Every command the documents show exists, with its flags; every link leads somewhere; the README's code runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import typer

from glm5_ascend.cli import app
from tests.support.command import ROOT, in_process, said, worked
from tests.support.documents import blocks, document, documents, headings, prose, section, shell_lines

#: deploy/TROUBLESHOOTING.md is written by a command and tested where that is.
DOCUMENTS = [name for name in documents() if name != "deploy/TROUBLESHOOTING.md"]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def shown() -> list[tuple[str, str]]:
    """(document, command line) of every glm5-ascend or make command in a block or in back quotes."""
    commands = []
    for name in DOCUMENTS:
        text = document(name)
        for line in shell_lines(text) + re.findall(r"`([^`]+)`", prose(text)):
            line = line.split("  #")[0].strip()
            if re.match(r"(?:[A-Z0-9_]+=\S+ )?(glm5-ascend|make) \S", line):
                commands.append((name, line))
    return commands


@pytest.mark.parametrize(("name", "line"), shown())
def test_command_exists(name: str, line: str) -> None:
    program, *words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z0-9_]+=", word)]
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words if "=" not in word and word != "..."} <= targets
        return
    if words[0].startswith("-"):
        assert words == ["--version"]
        return
    command = COMMANDS[words[0]]
    if hasattr(command, "commands"):
        command = command.commands[words[1]]
    options = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    flags = {word.split("=")[0] for word in words[: words.index("--") if "--" in words else None] if word[:2] == "--"}
    assert flags <= options | {"--help"}


def anchors(name: str) -> set[str]:
    """Anchors of the headings as hosts make them: lower case, signs dropped, blanks as hyphens."""
    return {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for _, words in headings(document(name))}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_headings(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document(name))):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = Path(os.path.normpath(ROOT / Path(name).parent / file)) if file else ROOT / name
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.relative_to(ROOT).as_posix()), target


@pytest.mark.long  # a minute; the functions it calls are tested one by one
def test_the_python_block_runs(tmp_path: Path) -> None:
    """In an empty folder, on the demo model, as a user would run it after the laptop's commands."""
    (block,) = (block for block in blocks(section(document("README.md"), "In Python")) if block.language == "python")
    (tmp_path / "work").mkdir()
    said(sys.executable, "-m", "glm5_ascend", "demo-model", "work/glm5", cwd=tmp_path)
    (tmp_path / "block.py").write_text(block.text, encoding="utf-8")
    assert said(sys.executable, "block.py", cwd=tmp_path).splitlines()[0] == "True"
    assert (tmp_path / "work/mine.yaml").is_file()
    assert any((tmp_path / "work/k8s").iterdir())


def test_the_quick_start_runs(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The single steps, with --dry-run where they would become a server."""
    lines = shell_lines(section(document("README.md"), "Quick start (laptop)"))
    steps = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("glm5-ascend ")]
    assert [words[0] for words in steps] == ["demo-model", "quantize", "verify", "serve"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    for words in steps:
        worked(in_process(*words, *(["--dry-run"] if words[0] == "serve" else [])))
        if words[0] == "demo-model":  # tests/cli/test_demo.py has the demo's own; a smaller one goes on from here
            shutil.rmtree(words[1])
            shutil.copytree(tiny_source, words[1])
