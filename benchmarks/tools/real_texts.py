"""Text that no calibration has seen and every machine has, for SmolLM2: three tasks of `glm5-ascend eval --text`.

Other versions of Python and of the packages have other words: the report prints the versions.
"""

from __future__ import annotations

import json
import sysconfig
from importlib.metadata import distribution, version
from pathlib import Path
from platform import python_version

from glm5_ascend.fidelity.evaluation.python_docs import documents, stable_hash

#: Whose licences are read, with Python's: long texts of lawyers.
LICENSED = ("numpy", "safetensors", "torch", "transformers")
#: One module of Python's library in so many is read as code.
MODULES = 8
#: Passages of a task, spread over its files, and characters of each: enough for 16 windows of 384 tokens.
PASSAGES, CHARACTERS = 8, 3500


def write_texts(path: Path) -> Path:
    """Write a .jsonl with the tasks `documentation` (held out), `licences` and `code`."""
    texts = {
        "documentation": documents(held_out=True),
        "licences": [_read(Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"), *_licences()],
        "code": modules(held_out=True),
    }
    path.write_text("".join(_record(task, "\n\n".join(pieces)) for task, pieces in texts.items()))
    return path


def modules(held_out: bool) -> list[str]:
    """The modules of Python's library that are read as code, or all others."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [_read(file) for file in files if (stable_hash(f"code:{file.name}") % MODULES == 0) == held_out]


def versions() -> str:
    """Whose texts they are."""
    return ", ".join([f"Python {python_version()}", *(f"{name} {version(name)}" for name in LICENSED)])


def _licences() -> list[str]:
    """The licence files of the packages, each text once."""
    files = [file for name in LICENSED for file in sorted(distribution(name).files or [], key=str)]
    wanted = [file for file in files if ".dist-info/" in str(file) and file.name.startswith(("LICENSE", "NOTICE"))]
    return list(dict.fromkeys(_read(Path(str(file.locate()))) for file in wanted))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _record(task: str, text: str) -> str:
    gap = (len(text) - CHARACTERS) // (PASSAGES - 1)
    passages = [text[i * gap : i * gap + CHARACTERS] for i in range(PASSAGES)]
    return json.dumps({"task": task, "text": "\n\n".join(passages)}) + "\n"
