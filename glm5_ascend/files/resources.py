"""Data files that travel inside the package, and YAML files checked key by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from glm5_ascend.errors import ConfigError, Glm5Error, MissingEnvironmentError, shortened, shown
from glm5_ascend.files.foreign import shortened_path
from glm5_ascend.files.yaml_file import yaml_document

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

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


def near(name: str, known: Iterable[str], what: str = "known") -> str:
    """A tip for a name that is not known: the one that was probably meant, and all there are, which `what` names."""
    import difflib

    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"{what}: {', '.join(names)}"


def read_yaml(
    path: Path,
    model: type[Model],
    *,
    error: type[Glm5Error] = ConfigError,
    tip: str = "the schema beside the file lists every key",
    keep: Callable[[Any], Any] = lambda content: content,
) -> Model:
    """A YAML file as a pydantic model.

    Args:
        error, tip: what is raised, and its second line, where the content is not what the model takes.
        keep: what of the content the model is about.
    Raises:
        ConfigError (or `error`): no YAML, or not what the model takes; names file, line and key.
    """
    from pydantic import ValidationError

    node, content = yaml_document(path, error)
    try:
        return model.model_validate(keep(content))
    except ValidationError as problem:
        first = problem.errors()[0]
        line, keys = _deepest(node, first["loc"])
        where = f"{shortened_path(path)}:{line}: {shortened('.'.join(keys)) or 'the file'}"
        raise error(f"{where}: {_said(first)}", tip) from None


def yaml_content(path: Path, *, error: type[Glm5Error] = ConfigError) -> Any:
    """What a YAML file says, unchecked: for files that were checked before and are changed. Raises as `read_yaml`."""
    return yaml_document(path, error)[1]


def _said(problem: ErrorDetails) -> str:
    """One problem of pydantic's in our words."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return "unknown key"
        case "missing":
            return "key is missing"
        case "union_tag_invalid":
            known = str(context["expected_tags"]).replace("'", "")
            return f"unknown {str(context['discriminator']).strip(chr(39))} {shown(context['tag'])}; known: {known}"
        case "union_tag_not_found":
            return f"without a {str(context['discriminator']).strip(chr(39))}"
        case "value_error":  # a validator of ours
            return shortened(str(context["error"]), 200)
    return f"{shortened(problem['msg'], 200)}, got {shown(problem['input'])}"


def schema_text(model: type[BaseModel]) -> str:
    """The JSON schema of a model, as the file that editors read."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema(by_alias=True)}
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def write_schemas(folder: Path, models: Mapping[str, type[BaseModel]]) -> None:
    """Write the schema of every model under its file name, and print where."""
    folder.mkdir(exist_ok=True)
    for name, model in models.items():
        (folder / name).write_text(schema_text(model), encoding="utf-8")
        print(folder / name)


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
