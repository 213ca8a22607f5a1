"""vLLM's source at the places that the plugin patches is the one that each patch was written for."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from pathlib import Path

import pytest

from glm5_ascend.serve.plugin import compat

pytestmark = pytest.mark.server


def source(location: str) -> str:
    """The first digits of the SHA-256 of the source of a class or function in vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    file, _, path = location.partition(":")
    text = (Path(spec.origin).parent / file).read_text()
    node: ast.AST = ast.parse(text)
    for name in path.split("."):
        (node,) = (inner for inner in ast.iter_child_nodes(node) if getattr(inner, "name", "") == name)
    return hashlib.sha256((ast.get_source_segment(text, node) or "").encode()).hexdigest()[:12]


@pytest.mark.parametrize("patch", compat.PATCHES, ids=lambda patch: patch.location)
def test_vllm_is_as_the_patch_was_written_for(patch: compat.Patch) -> None:
    assert source(patch.location) == patch.source, (
        f"{patch.location} changed; is {patch.ours} right, and needed: {patch.until}?"
    )
