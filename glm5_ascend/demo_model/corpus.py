"""The text every Python carries: the language reference in `pydoc_data.topics` and the docstrings of the stdlib."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from functools import lru_cache
from pathlib import Path

HELD_OUT_SHARE = 24  # one document in so many is kept for validation
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}
MIN_CHARS, MAX_CHARS = 160, 6000


def stable_hash(text: str) -> int:
    """A hash that is the same in every process and on every machine (`hash()` is salted)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _docstrings(path: Path) -> str:
    """All docstrings of one module, in source order, dedented and joined by blank lines."""
    tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = "" if isinstance(node, ast.Module) else f"{node.name}: "
                found.append((getattr(node, "lineno", 0), name + inspect.cleandoc(text)))
    return "\n\n".join(text for _, text in sorted(found))


@lru_cache(maxsize=1)
def documents() -> tuple[tuple[str, str], ...]:
    """(name, text) of every document, sorted by name; each between 160 and 6000 characters."""
    from pydoc_data.topics import topics

    raw = {f"topics/{name}": text for name, text in topics.items()}
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            try:
                raw[str(relative)] = _docstrings(path)
            except (SyntaxError, ValueError):  # a few stdlib files are broken on purpose
                continue
    pieces: list[tuple[str, str]] = []
    for name in sorted(raw):
        text = raw[name].strip()
        for part, start in enumerate(range(0, len(text), MAX_CHARS)):
            piece = text[start : start + MAX_CHARS]
            if len(piece) >= MIN_CHARS and piece.isascii():
                pieces.append((f"{name}#{part}", piece))
    return tuple(pieces)


def is_held_out(document_name: str) -> bool:
    """Whether a document belongs to the validation part: all parts of one file go together."""
    return stable_hash("text:" + document_name.split("#")[0]) % HELD_OUT_SHARE == 0


def training_texts() -> list[str]:
    """Texts to train on."""
    return [text for name, text in documents() if not is_held_out(name)]


def validation_texts() -> list[str]:
    """Texts never trained on."""
    return [text for name, text in documents() if is_held_out(name)]
