"""YAML files of strangers: a value or one line that names the file, never a traceback, never without end."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from glm5_ascend.errors import RecipeError
from glm5_ascend.files.yaml_file import MAX_BYTES, yaml_document
from glm5_ascend.quantize.recipe import load_recipe


def _aliases(value: str, line: str) -> str:
    """Ten lines, each of ten aliases of the one before: 10 ** 10 values."""
    names = "abcdefghijk"
    return f"a: &a {value}\n" + "".join(
        line.format(new=new, old=", ".join([f"*{old}"] * 10)) for old, new in itertools.pairwise(names)
    )


BAD = {
    "aliases of lists": (_aliases("[x]", "{new}: &{new} [{old}]\n"), "more than 8 aliases"),
    "aliases merged": (_aliases("{k: 1}", "{new}: &{new} {{<<: [{old}]}}\n"), "more than 8 aliases"),
    "an alias of itself": ("a: &a [*a]", "nested more than"),
    "a date that is none": ("b: 1\na: 2001-99-99", "not valid YAML: month must be"),
    "a float that is none": ("a: !!float abc", "not valid YAML: could not convert string to float"),
    "an integer without digits": ("a: !!int 0x", "not valid YAML: invalid literal for int"),
    "a bool that is none": ("a: !!bool x", "not valid YAML: 'x'"),
    "a timestamp that is none": ("a: !!timestamp x", "not valid YAML: "),
    "code": ("!!python/object/apply:os.system [touch executed]", "could not determine a constructor"),
    "many digits": ("a: " + "9" * 5000, "digits"),
    "digits in base 60": ("a: 1" + ":1" * 5000, "a number of too many digits"),
    "a key twice": ("a: 1\na: 2", ":2: not valid YAML: the key a is given twice"),
    "half a pair": ('a: "\\ud800"', "half of a UTF-16 pair"),
    "deep lists": ("[" * 50_000, "levels deep"),
    "deep keys": ("? " * 5000, "levels deep"),
    "a zero byte": ("a: \0", "unacceptable character"),
    "a list as a key": ("? [1]\n: 2", "unhashable key"),
    "two documents": ("--- 1\n--- 2", "another document"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_content(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    content, expected = BAD[kind]
    path.write_text(content)
    for read in (lambda: yaml_document(path, RecipeError), lambda: load_recipe(path)):
        with pytest.raises(RecipeError) as raised:
            read()
        assert str(path) in raised.value.message and expected in raised.value.message
        assert len(raised.value.message) < 400 and raised.value.message.isprintable() and raised.value.tip
    assert not (tmp_path / "executed").exists()


def test_a_long_file_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("- a\n" * (MAX_BYTES // 4 + 1))
    with pytest.raises(RecipeError, match="larger than 128 KiB"):
        load_recipe(path)


def test_anchors_of_a_sane_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: &base {x: 1}\nall: [*base, *base]\nmore: {<<: *base, y: 2}\n")
    assert yaml_document(path, RecipeError)[1]["more"] == {"x": 1, "y": 2}
