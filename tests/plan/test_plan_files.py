"""The planner's own YAML files: unknown keys are refused by file, line and key; editors get the same as a schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from glm5_ascend.errors import ConfigError
from glm5_ascend.files.resources import schema_text
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.baselines import BaselinesFile, load_rows
from glm5_ascend.plan.data_files import FamilyFile, FittedFile, MemoryFile, data_file
from glm5_ascend.plan.hardware import Hardware, known_hardware
from glm5_ascend.plan.schemas import SCHEMAS

FILES: dict[str, type[BaseModel]] = {
    "baselines.yaml": BaselinesFile,
    "fitted.yaml": FittedFile,
    "hardware/a3.yaml": Hardware,
    "memory.yaml": MemoryFile,
    "models.yaml": FamilyFile,
}


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("baselines.yaml", "  drafts: 3\n", "  drafts: 3\n  colour: 1\n", "defaults.colour: unknown key"),
        ("baselines.yaml", "dp: 1, prompt: 3500", "dp: 1, colour: 1, prompt: 3500", "rows.0.colour: unknown key"),
        ("baselines.yaml", "id: 5.1-1n, ", "", "rows.0.id: key is missing"),
        ("fitted.yaml", "  gather:", "  gathers:", "efficiencies.gather: key is missing"),
        ("fitted.yaml", "bands:", "bends: 1\nbands:", "bends: unknown key"),
        ("hardware/a3.yaml", "  vector: {value: 11.06e+12", "  vector: {value: -1", "rates.vector.value: Input should"),
        ("hardware/a3.yaml", "quality: paper", "quality: hearsay", "links.node.quality: Input should be 'vendor'"),
        ("memory.yaml", "low: 0.5e+9", "low: 2.5e+9", "graphs_bytes: 1.5e+09 is not between low 2.5e+09 and high"),
        ("memory.yaml", "communicators: {", "communicators: {colour: 1, ", "communicators.colour: unknown key"),
        ("models.yaml", "  bf16: {experts: FLOAT", "  bf16: {experts: FP8", "quantizations.bf16.experts: Input should"),
    ],
)
def test_what_no_model_knows_is_refused_by_line(name: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    text = data_file(name).read_text("utf-8")
    assert old in text
    path = tmp_path / "file.yaml"
    path.write_text(text.replace(old, new, 1))
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(ConfigError) as caught:
        read_yaml(path, FILES[name])
    line_number, _, text_of_error = caught.value.message.removeprefix(f"{path}:").partition(": ")
    assert message in text_of_error and caught.value.tip
    if "missing" not in message:  # else the line is that of the mapping
        assert abs(int(line_number) - line) <= 1


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_current(name: str) -> None:
    """`python -m glm5_ascend.plan.schemas` writes them."""
    assert data_file(f"schemas/{name}").read_text("utf-8") == schema_text(SCHEMAS[name])


def test_every_file_names_its_schema_and_is_read() -> None:
    paths = list(data_file("").rglob("*.yaml"))
    assert {path.relative_to(data_file("")).as_posix() for path in paths} == {
        *FILES,
        *(f"hardware/{name}.yaml" for name in known_hardware() if name != "a3"),
    }
    for path in paths:
        first = path.read_text("utf-8").splitlines()[0]
        assert first.startswith("# yaml-language-server: $schema="), path
        schema = (path.parent / first.partition("=")[2]).resolve()
        assert schema.is_file()
        read_yaml(path, SCHEMAS[schema.name])


def test_a_row_has_its_own_word_or_the_defaults() -> None:
    rows = {row.id: row for row in load_rows()}
    assert rows["5.1-1n"].hardware == "a3" and rows["5.1-2xA2"].hardware == "a2"
    assert rows["5.1-1n"].sequences == 32 and rows["5.1-2n-64k-50"].sequences == 6
    assert rows["5.1-2n-3.5k-20-tp4"].version == "03636cdb" != rows["5.1-1n"].version
