"""JSON schemas of the planner's YAML files, for editors, from the models that read them.

`python -m glm5_ascend.plan.schemas` writes them.
"""

from __future__ import annotations

from pydantic import BaseModel

from glm5_ascend.files.resources import write_schemas
from glm5_ascend.plan.baselines import BaselinesFile
from glm5_ascend.plan.data_files import FamilyFile, FittedFile, MemoryFile, data_file
from glm5_ascend.plan.hardware import Hardware

#: By file name in plan/data/schemas.
SCHEMAS: dict[str, type[BaseModel]] = {
    "baselines.json": BaselinesFile,
    "fitted.json": FittedFile,
    "hardware.json": Hardware,
    "memory.json": MemoryFile,
    "models.json": FamilyFile,
}


def main() -> None:
    """Write every schema."""
    write_schemas(data_file("schemas"), SCHEMAS)


if __name__ == "__main__":
    main()
