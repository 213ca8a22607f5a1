"""Data files that travel inside the package, and YAML files checked key by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from glm5_ascend.errors import ConfigError, Glm5Error, MissingEnvironmentError

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
    import yaml
    from pydantic import ValidationError

    text, content = _parsed(path, error)
    try:
        return model.model_validate(keep(content))
    except ValidationError as problem:
        first = problem.errors()[0]
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        line, keys = _deepest(node, first["loc"])
        raise error(f"{path}:{line}: {'.'.join(keys) or 'the file'}: {_said(first)}", tip) from None


def yaml_content(path: Path, *, error: type[Glm5Error] = ConfigError) -> Any:
    """What a YAML file says, unchecked: for files that were checked before and are changed. Raises as `read_yaml`."""
    return _parsed(path, error)[1]


def _parsed(path: Path, error: type[Glm5Error]) -> tuple[str, Any]:
    """(text, content) of a YAML file."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return text, yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read: {problem}", "check path and permissions, or restore the file") from None
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        said = " ".join(str(getattr(problem, "problem", None) or problem).split())
        raise error(f"{path}{where}: not valid YAML: {said}", "correct the line") from None
    except RecursionError:
        raise error(f"{path}: not valid YAML: nested too deeply", "restore the file") from None


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
            return f"unknown {str(context['discriminator']).strip(chr(39))} {context['tag']!r:.60}; known: {known}"
        case "union_tag_not_found":
            return f"without a {str(context['discriminator']).strip(chr(39))}"
        case "value_error":  # a validator of ours
            return str(context["error"])
    return f"{problem['msg']}, got {problem['input']!r:.60}"


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
