"""JSON schema of a recipe, from the models that read it: `python -m glm5_ascend.quantize.recipe_schema` writes it."""

from __future__ import annotations

from glm5_ascend.files.resources import data_dir, write_schemas
from glm5_ascend.quantize.recipe import RECIPE_DIR, Recipe

NAME = "schema.json"


def main() -> None:
    """Write the schema again."""
    write_schemas(data_dir(RECIPE_DIR), {NAME: Recipe})


if __name__ == "__main__":
    main()
