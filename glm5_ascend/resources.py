"""Data files that travel inside the package, and YAML files checked key by key."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from glm5_ascend.errors import ConfigError, MissingEnvironmentError

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)


def data_dir(name: str) -> Path:
    """Directory `name` of the package, e.g. `data/quant_recipes`.

    Raises:
        MissingEnvironmentError: the checkout lost its links (git's core.symlinks=false) or the install is incomplete.
    """
    path = Path(str(files("glm5_ascend").joinpath(*name.split("/"))))
    if not path.is_dir():
        raise MissingEnvironmentError(
            f"{path}: data directory is missing", "clone with `git -c core.symlinks=true clone`, or install the wheel"
        )
    return path


def read_yaml(path: Path, model: type[Model]) -> Model:
    """A YAML file as a pydantic model.

    Raises:
        ConfigError: no YAML, or not what the model takes; names file, line and key.
    """
    import yaml
    from pydantic import ValidationError

    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", "restore the file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}", "correct the line"
        ) from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        line, keys = _deepest(node, first["loc"])
        said = {"extra_forbidden": "unknown key", "missing": "key is missing"}.get(
            first["type"], f"{first['msg']}, got {first['input']!r:.60}"
        )
        raise ConfigError(
            f"{path}:{line}: {'.'.join(keys) or 'the file'}: {said}", "the schema beside the file lists every key"
        ) from None


def schema_text(model: type[BaseModel]) -> str:
    """The JSON schema of a model, as the file that editors read."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema(by_alias=True)}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def _deepest(node: Any, location: tuple[int | str, ...]) -> tuple[int, list[str]]:
    """Line (from 1) of the last part of `location` that stands in the YAML tree, and the keys that name the place.

    Parts that are no keys (pydantic names the branch of a union) are left out, the last one of the location stays.
    """
    import yaml

    line, keys = (node.start_mark.line if node is not None else 0), []
    for part in location:
        if isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if key.value == part), None)
            if entry is None:
                continue
            line, node = entry[0].start_mark.line, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            continue
        keys.append(str(part))
    if location and (not keys or keys[-1] != str(location[-1])) and not isinstance(node, yaml.ScalarNode):
        keys.append(str(location[-1]))  # the key that is missing
    return line + 1, keys
