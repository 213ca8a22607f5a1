"""Text that every Python has: the language reference in `pydoc_data.topics` and the docstrings of the standard library.

`eval` takes the held-out documents where the user names no text. Neither the calibration text nor the training of the
demo model uses them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path

#: One source file in this many is held out.
HELD_OUT_SHARE = 24
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}
MIN_CHARS, MAX_CHARS = 160, 6000


@cache
def documents(held_out: bool) -> list[str]:
    """The held-out or the training documents of the running Python, sorted by name, each of 160 to 6000 characters."""
    from pydoc_data.topics import topics

    texts = {f"topics/{name}": text for name, text in topics.items() if _is_held_out(f"topics/{name}") == held_out}
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and _is_held_out(str(relative)) == held_out:
            with suppress(SyntaxError, ValueError):  # a few files of the standard library are broken on purpose
                texts[str(relative)] = _docstrings(path)
    pieces: list[str] = []
    for _, text in sorted(texts.items()):
        whole = text.strip()
        pieces += (whole[start : start + MAX_CHARS] for start in range(0, len(whole), MAX_CHARS))
    return [piece for piece in pieces if len(piece) >= MIN_CHARS and piece.isascii()]


def stable_hash(text: str) -> int:
    """A hash that is the same in every process and on every machine (`hash()` is salted)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _docstrings(path: Path) -> str:
    docstrings: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = "" if isinstance(node, ast.Module) else f"{node.name}: "
                docstrings.append((getattr(node, "lineno", 0), name + inspect.cleandoc(text)))
    return "\n\n".join(text for _, text in sorted(docstrings))


def _is_held_out(file: str) -> bool:
    return stable_hash("text:" + file) % HELD_OUT_SHARE == 0
