"""Has a file changed since the quantizer wrote it?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_ascend.errors import CheckpointError
from glm5_ascend.verify import verify
from tests.verify.support.editor import INDEX

Copy = Callable[[Path], Path]


@pytest.mark.parametrize("name", ["chat_template.jinja", INDEX, "tokenizer.json"])
def test_an_edited_file(name: str, tiny_w4a8: Path, editable: Copy) -> None:
    """An error where the engine computes with it; a template people edit on purpose."""
    out = editable(tiny_w4a8)
    (out / name).write_text((out / name).read_text() + " ")
    level = "warning" if name == "chat_template.jinja" else "error"
    assert [(f.id, f.file, f.level) for f in verify(out).findings] == [("provenance.changed", name, level)]


def test_another_output_is_no_source(tiny_w4a8: Path) -> None:
    with pytest.raises(CheckpointError, match="already quantized"):
        verify(tiny_w4a8, against=tiny_w4a8)
