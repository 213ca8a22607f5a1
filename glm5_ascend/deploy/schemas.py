"""JSON schemas of the YAML files in deploy/, for editors, from the models that read the files.

`python -m glm5_ascend.deploy.schemas` writes them.
"""

from __future__ import annotations

from pydantic import BaseModel

from glm5_ascend.deploy.profiles.file import ProfileFile
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rules.load import RuleFile, ThreadFile
from glm5_ascend.files.resources import data_dir, write_schemas

#: By file name in deploy/schemas.
SCHEMAS: dict[str, type[BaseModel]] = {
    "profile.json": ProfileFile,
    "rules.json": RuleFile,
    "threads.json": ThreadFile,
    "values.json": PodValues,
}


def main() -> None:
    """Write all schemas."""
    write_schemas(data_dir("data/deploy") / "schemas", SCHEMAS)


if __name__ == "__main__":
    main()
