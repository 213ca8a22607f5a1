"""deploy/TROUBLESHOOTING.md, from the rules of `doctor`: `python -m glm5_ascend.deploy.troubleshooting` writes it."""

from __future__ import annotations

import re
from typing import get_args

from glm5_ascend.deploy.rules.expression import names_in
from glm5_ascend.deploy.rules.facts import FACTS
from glm5_ascend.deploy.rules.load import Rule, Topic, rules
from glm5_ascend.files.resources import data_dir

NAME = "TROUBLESHOOTING.md"
THREADS = "https://github.com/vllm-project/vllm-ascend/issues/"
HEAD = """\
# Troubleshooting

Written by `python -m glm5_ascend.deploy.troubleshooting` from [rules.yaml](rules.yaml): change it there.

`glm5-ascend doctor DIR --profile NAME` checks all of these for your machine, checkpoint and flags.
Error: the engine refuses it, or its results are wrong; `serve` refuses it, too. Warning: a known problem.
A cause is a condition over the names at the end of this page; `{name}` stands for the value of a name.
"""
COLUMNS = "| | symptom | cause | fix | source |\n|---|---|---|---|---|\n"


def page() -> str:
    """The whole file: a table per topic with errors first, and the names in causes."""
    parts = [HEAD]
    for topic in get_args(Topic):
        selected = sorted((rule for rule in rules() if rule.topic == topic), key=lambda rule: rule.level)
        parts.append(f"## {topic[0].upper()}{topic[1:]}\n\n{COLUMNS}{''.join(map(row, selected))}")
    used = {name for rule in rules() for name in names_in(rule.when)}
    names = [f"| `{name}` | {meaning} |\n" for name, meaning in FACTS.items() if name in used]
    return "\n".join([*parts, "## Names in causes\n\n| name | meaning |\n|---|---|\n" + "".join(names)])


def row(rule: Rule) -> str:
    """One line of a table, with links to vllm-ascend's threads."""
    source = re.sub(r"#(\d+)", rf"[#\1]({THREADS}\1)", rule.known_from)
    message, fix = (re.sub(r"(\{\w+\})", r"`\1`", text).replace("*", "\\*") for text in (rule.message, rule.fix))
    cells = [f"{rule.id} {rule.level}", message, f"`{rule.when}`", fix, source]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main() -> None:
    """Write the file again."""
    path = data_dir("data/deploy") / NAME
    path.write_text(page(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
