"""No private words as names, no docstring that is half a sentence, no function longer than a screen or two."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.test_architecture import SOURCES, TREES

#: Words that name no thing. A variable is named after what it holds: `tensors`, `path`, `workspace`.
PRIVATE_WORDS = frozenset(
    {
        "adopt", "behind", "beside", "chosen", "each", "forget", "found", "give_back", "given", "hand_over", "held",
        "kept", "known", "learnt", "made", "meet", "mend", "own", "place", "room", "said", "stranger", "turned",
        "wanted",
    }
)  # fmt: skip
#: First words of a docstring that is a fragment of a sentence.
FRAGMENT = re.compile(r"^(Of|The same|As|By|Those|Its|Whether|Where|How|What|Same)\b")
LONGEST_FUNCTION = 60


def problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and fault of everything that a reader of the file would stumble over."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRIVATE_WORDS:
            yield node.lineno, f"{node.id!r} names no thing"
        elif isinstance(node, ast.arg) and node.arg in PRIVATE_WORDS:
            yield node.lineno, f"{node.arg!r} names no thing"
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.lstrip("_") in PRIVATE_WORDS:
            yield node.lineno, f"{node.name!r} names no thing"
        docstring = (ast.get_docstring(node) or "").strip()
        if FRAGMENT.match(docstring) and "\n\n" not in docstring:
            yield node.lineno, f"not a sentence: {docstring.splitlines()[0]!r}"
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > LONGEST_FUNCTION and not isinstance(node, ast.ClassDef):
            yield node.lineno, f"{node.name} has {length} lines"


def test_names_and_docstrings_are_plain() -> None:
    files = {module: path for path, module in SOURCES.items()}
    assert [f"{files[module]}:{line} {fault}" for module in TREES for line, fault in problems(TREES[module])] == []


def test_each_kind_of_problem_is_reported() -> None:
    body = "\n    pass" * LONGEST_FUNCTION
    source = f'def f(place):\n    "Of one call."\n    found = 1\n\n\nclass Room:\n    pass\n\n\ndef long():{body}\n'
    lines = [line for line, _ in problems(ast.parse(source))]
    assert sorted(lines) == [1, 1, 3, 10]
