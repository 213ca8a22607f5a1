"""The one reader of YAML: recipes, machines, profiles. `resources.read_yaml` also checks what the keys say."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from glm5_ascend.errors import Glm5Error, shortened
from glm5_ascend.files.foreign import MAX_DEPTH, MAX_DIGITS, defect, read_bytes, shortened_path

#: Our largest has 21 kB, msModelSlim's recipes less.
MAX_BYTES = 128 * 1024
#: Values of a document, an alias counted as what it stands for: ten lines of aliases can stand for 10 ** 9 of them.
MAX_VALUES = 100_000
_FIX = "check path and permissions, or restore the file"


def yaml_document(path: Path, error: type[Glm5Error]) -> tuple[Any, Any]:
    """(tree of nodes with their lines, value) of a YAML file.

    Raises:
        error: one line with the path, and the line in the file where there is one: not there, no regular file, too
            large, not UTF-8, not YAML, nested too deeply, aliases that stand for too much or for themselves, a key
            given twice, a tag or a value that Python has nothing for (`!!float abc`, the date 2001-99-99), a number of
            too many digits, half a UTF-16 pair.
    """
    import yaml

    data = read_bytes(path, MAX_BYTES, error, _FIX)
    try:
        text = data.decode("utf-8")
        _check_depth(text)
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            _check_size(node)
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
        said = " ".join(str(getattr(problem, "problem", None) or problem).split())
        raise error(
            f"{shortened_path(path)}{where}: not valid YAML: {shortened(said, 160)}", "correct the line"
        ) from None
    except (ValueError, RecursionError) as problem:
        said = "nested too deeply" if isinstance(problem, RecursionError) else shortened(str(problem), 160)
        raise error(f"{shortened_path(path)}: not valid YAML: {said}", "restore the file") from None


def _check_depth(text: str) -> None:
    """The composer calls itself for each level: count before it does."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def _check_size(node: Any) -> None:
    """Count values with every alias written out; the sum of a node that is met again is known already."""
    import yaml

    known: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(each: Any, depth: int) -> int:
        if depth > MAX_DEPTH or id(each) in open_nodes:
            raise ValueError("an alias inside of what it stands for, or nested too deeply")
        if id(each) not in known:
            open_nodes.add(id(each))
            children: list[Any] = []
            if isinstance(each, yaml.MappingNode):
                children = [part for pair in each.value for part in pair]
            elif isinstance(each, yaml.SequenceNode):
                children = each.value
            known[id(each)] = 1 + sum(size(child, depth + 1) for child in children)
            open_nodes.discard(id(each))
        if known[id(each)] > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values, aliases written out")
        return known[id(each)]

    if node is not None:
        size(node, 1)


@cache
def _loader() -> Any:
    """YAML's safe loader, with an error of its own, and so a line, for each value that Python refuses."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_DIGITS and _numeric(node.tag):
                raise yaml.constructor.ConstructorError(
                    None, None, f"a number of {len(node.value)} digits", node.start_mark
                )
            try:
                return super().construct_object(node, deep)
            except yaml.YAMLError:
                raise
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as problem:
                what = str(node.tag).removeprefix("tag:yaml.org,2002:")
                raise yaml.constructor.ConstructorError(
                    None, None, f"not a {shortened(what)}: {shortened(str(problem))}", node.start_mark
                ) from None

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


def _numeric(tag: str) -> bool:
    return tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
