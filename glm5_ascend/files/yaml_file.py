"""The reader of YAML (recipes, machines, profiles) as pydantic models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from glm5_ascend.errors import ConfigError, Glm5Error, shortened, shown
from glm5_ascend.files.untrusted import MAX_DEPTH, defect, read_bytes, shortened_path

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

    Model = TypeVar("Model", bound=BaseModel)

#: Our largest has 21 kB, msModelSlim's recipes less.
MAX_BYTES = 128 * 1024
#: Ten lines of aliases can stand for 10 ** 9 values, this many for some twenty times those of the file.
MAX_ALIASES = 8
_FIX = "check path and permissions, or restore the file"


def read_yaml(
    path: Path,
    model: type[Model],
    *,
    error: type[Glm5Error] = ConfigError,
    tip: str = "the schema beside the file lists every key",
    keep: Callable[[Any], Any] = lambda content: content,
) -> Model:
    """Read a YAML file as a pydantic model.

    Args:
        error, tip: class of the error, and its tip where the model refuses the content.
        keep: selects the part of the content that the model describes.
    Raises:
        error: not YAML, or refused by the model; names file, line and key.
    """
    from pydantic import ValidationError

    node, content = yaml_document(path, error)
    try:
        return model.model_validate(keep(content))
    except ValidationError as problem:
        first = problem.errors()[0]
        line, keys = _deepest(node, first["loc"])
        where = f"{shortened_path(path)}:{line}: {shortened('.'.join(keys)) or 'the file'}"
        raise error(f"{where}: {_message(first)}", tip) from None


def yaml_content(path: Path, *, error: type[Glm5Error] = ConfigError) -> Any:
    """Return the content of a YAML file without a model. Raises as `read_yaml`."""
    return yaml_document(path, error)[1]


def _message(problem: ErrorDetails) -> str:
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return "unknown key"
        case "missing":
            return "key is missing"
        case "union_tag_invalid":
            tags = str(context["expected_tags"]).replace("'", "")
            return f"unknown {str(context['discriminator']).strip(chr(39))} {shown(context['tag'])}; known: {tags}"
        case "union_tag_not_found":
            return f"without a {str(context['discriminator']).strip(chr(39))}"
        case "value_error":  # a validator of ours
            return shortened(str(context["error"]), 200)
    return f"{shortened(problem['msg'], 200)}, got {shown(problem['input'])}"


def _deepest(node: Any, location: tuple[int | str, ...]) -> tuple[int, list[str]]:
    """Line (from 1) of the last part of `location` that exists in the YAML tree, and the keys that lead to it.

    Parts that are not keys (pydantic names the branch of a union) are left out, except the last one.
    """
    import yaml

    line, keys = (node.start_mark.line if node is not None else 0), []
    for step in location:
        if isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if key.value == step), None)
            if entry is None:
                continue
            line, node = entry[0].start_mark.line, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line
        else:
            continue
        keys.append(str(step))
    if location and (not keys or keys[-1] != str(location[-1])) and not isinstance(node, yaml.ScalarNode):
        keys.append(str(location[-1]))  # the key that is missing
    return line + 1, keys


def yaml_document(path: Path, error: type[Glm5Error]) -> tuple[Any, Any]:
    """(tree of nodes with their lines, value) of a YAML file.

    Raises:
        error: one line with the path, and the line in the file where there is one: not there, no regular file, too
            large, not YAML, nested too deeply, many aliases or one of itself, a key given twice, a tag or a value that
            Python has nothing for (`!!float abc`, the date 2001-99-99), what `defect` describes.
    """
    import yaml

    data = read_bytes(path, MAX_BYTES, error, _FIX)
    try:
        text = data.decode("utf-8")
        _check_events(text)
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            content = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        if problem := defect(content):
            raise ValueError(problem)
        return node, content
    except UnicodeDecodeError as problem:
        raise error(f"{shortened_path(path)}: cannot be read: {problem}", _FIX) from None
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        message = " ".join(str(getattr(problem, "problem", None) or problem).split())
        raise error(
            f"{shortened_path(path)}{where}: not valid YAML: {shortened(message, 160)}", "correct the line"
        ) from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as problem:
        message = "nested too deeply" if isinstance(problem, RecursionError) else shortened(str(problem), 160)
        raise error(f"{shortened_path(path)}: not valid YAML: {message}", "restore the file") from None


def _check_events(text: str) -> None:
    """The composer calls itself for each level, and aliases multiply: count both before it does."""
    import yaml

    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        if aliases > MAX_ALIASES:
            raise ValueError(f"more than {MAX_ALIASES} aliases: write the values out")


@cache
def _loader() -> Any:
    """YAML's safe loader, which refuses a key that is given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                        raise yaml.constructor.ConstructorError(
                            None, None, f"the key {shortened(key.value)} is given twice", key.start_mark
                        )
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader
