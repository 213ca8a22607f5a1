"""deploy/variables.yaml: variables of profiles that neither vLLM nor vllm-ascend defines, with their readers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, RootModel

from glm5_ascend.files.resources import data_dir
from glm5_ascend.files.yaml_file import read_yaml


class Variable(BaseModel):
    """An environment variable. reader: library that reads it; source: document that says so."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    reader: str
    source: str


class VariableFile(RootModel[dict[str, Variable]]):
    """deploy/variables.yaml."""


def variables() -> dict[str, Variable]:
    """All variables by name."""
    return read_yaml(data_dir("data/deploy") / "variables.yaml", VariableFile).root
