"""deploy/TROUBLESHOOTING.md, from the rules of `doctor`: `python -m glm5_ascend.deploy.troubleshooting` writes it."""

from __future__ import annotations

import ast
import re
from typing import get_args

from glm5_ascend.deploy.rules.expression import names_in
from glm5_ascend.deploy.rules.facts import FACTS
from glm5_ascend.deploy.rules.load import Rule, Topic, rules
from glm5_ascend.engine_lines import STABLE
from glm5_ascend.files.resources import data_dir

NAME = "TROUBLESHOOTING.md"
THREADS = "https://github.com/vllm-project/vllm-ascend/issues/"
#: Facts that are versions -> name of the package.
PACKAGES = {"transformers": "transformers", "vllm_ascend": "vllm-ascend", "cann": "CANN"}
HEAD = """\
# Troubleshooting

Written by `python -m glm5_ascend.deploy.troubleshooting` from [rules.yaml](rules.yaml): change it there.

`glm5-ascend doctor DIR --profile NAME` checks all of these for your machine, checkpoint and flags.
Error: the engine refuses it, or its results are wrong; `serve` refuses it, too. Warning: a known problem.
A cause is a condition over the names at the end of this page. An empty `versions` means all versions.
"""
NAMES = """\
## Names in causes

"""
COLUMNS = "| | symptom | cause | versions | fix | source |\n|---|---|---|---|---|---|\n"


def page() -> str:
    """The whole file."""
    chapters = [chapter(topic) for topic in get_args(Topic)]
    used = {name for rule in rules() for name in names_in(rule.when)} - set(PACKAGES)
    names = [f"| `{name}` | {meaning} |\n" for name, meaning in FACTS.items() if name in used]
    return "\n".join([HEAD, *chapters, NAMES + "| name | meaning |\n|---|---|\n" + "".join(names)])


def chapter(topic: str) -> str:
    """Heading and table of a topic's rules, errors first."""
    selected = sorted((rule for rule in rules() if rule.topic == topic), key=lambda rule: rule.level)
    return f"## {topic[0].upper()}{topic[1:]}\n\n" + COLUMNS + "".join(map(row, selected))


def row(rule: Rule) -> str:
    """One line of the table."""
    versions, cause = split(rule.when)
    condition = f"`{cause}`" if cause else ""
    cells = [
        f"{rule.id} {rule.level}", readable(rule.message), condition, versions, readable(rule.fix),
        linked(rule.known_from),
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def split(when: str) -> tuple[str, str]:
    """Split a condition into the versions that it requires and the rest."""
    body = ast.parse(when, mode="eval").body
    parts = body.values if isinstance(body, ast.BoolOp) and isinstance(body.op, ast.And) else [body]
    ranges: dict[str, list[str]] = {}
    rest: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Compare) and isinstance(part.left, ast.Name) and part.left.id in PACKAGES:
            _, sign, version = ast.unparse(part).split(" ", 2)
            ranges.setdefault(PACKAGES[part.left.id], []).append(f"{sign} {version.strip(chr(39))}".removeprefix("== "))
        else:
            rest.append(part)
    return "; ".join(f"{package} {', '.join(signs)}" for package, signs in ranges.items()), _joined(rest)


def _joined(parts: list[ast.expr]) -> str:
    """Join conditions by `and`."""
    if not parts:
        return ""
    return ast.unparse(parts[0] if len(parts) == 1 else ast.BoolOp(ast.And(), parts))


def readable(text: str) -> str:
    """A message with names of facts instead of their values."""
    text = re.sub(r"(transformers|vllm-ascend|CANN) \{(?:transformers|vllm_ascend|cann)\}", r"\1", text)
    values = {name: f"`{name}`" for name in FACTS} | dict.fromkeys(PACKAGES, "this version")
    triton = STABLE.packages["triton-ascend"]
    return text.format_map(values | {"wanted_triton": triton}).replace("*", "\\*")


def linked(source: str) -> str:
    """`#123` as a link to vllm-ascend's thread."""
    return re.sub(r"#(\d+)", rf"[#\1]({THREADS}\1)", source)


def main() -> None:
    """Write the file again."""
    path = data_dir("data/deploy") / NAME
    path.write_text(page(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
