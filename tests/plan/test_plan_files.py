"""The planner's own YAML files: unknown keys are refused by file, line and key; editors get the same as a schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from glm5_ascend.errors import ConfigError
from glm5_ascend.files.resources import schema_text
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.evidence import BaselinesFile
from glm5_ascend.plan.hardware import FittedFile, Hardware, known_hardware, load_hardware
from glm5_ascend.plan.inputs import data_file
from glm5_ascend.plan.layout import check_engine, parse_layout
from glm5_ascend.plan.model import FamilyFile, named
from glm5_ascend.plan.proven import ProvenFile, entries

FILES: dict[str, type[BaseModel]] = {
    "baselines.yaml": BaselinesFile,
    "fitted.yaml": FittedFile,
    "hardware/a3.yaml": Hardware,
    "models.yaml": FamilyFile,
    "proven.yaml": ProvenFile,
}


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("baselines.yaml", "id: 5.1-1n, ", "id: 5.1-1n, colour: 1, ", "rows.0.colour: unknown key"),
        ("baselines.yaml", "quant: w8a8, nodes: 1", "nodes: 1", "rows.0.quant: key is missing"),
        ("fitted.yaml", "  memory:", "  memories:", "constants.memory: key is missing"),
        ("fitted.yaml", "bands:", "bends: 1\nbands:", "bends: unknown key"),
        ("hardware/a3.yaml", "  vector: 11.06e+12", "  vector: -1", "rates.vector: Input should"),
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


def test_the_schema_of_machines_is_current() -> None:
    """`python -m glm5_ascend.plan.hardware` writes it."""
    assert data_file("schemas/hardware.json").read_text("utf-8") == schema_text(Hardware)
    for name in known_hardware():
        assert "$schema=../schemas/hardware.json" in data_file(f"hardware/{name}.yaml").read_text("utf-8")
        assert load_hardware(name).name == name


def test_every_documented_layout_is_possible_and_names_its_source() -> None:
    weights = {"w4a8": "w4a8", "w8a8": "w8a8", "bf16": "bf16"}
    for entry in entries():
        model, hardware = named(entry.models[0], weights[entry.experts]), load_hardware(entry.hardware)
        layout = parse_layout(entry.layout, model.config, 1.0)
        for engine in layout.engines.values():
            check_engine(engine, model.config, hardware)
        assert entry.source and layout.nodes(hardware) == entry.nodes, entry
