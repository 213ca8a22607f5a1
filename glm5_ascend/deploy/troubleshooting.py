"""deploy/TROUBLESHOOTING.md, from the rules of `doctor` and the threads of users.

`python -m glm5_ascend.deploy.troubleshooting` writes it.
"""

from __future__ import annotations

import re
from typing import get_args

from glm5_ascend.deploy.rules.expression import names_in
from glm5_ascend.deploy.rules.facts import FACTS
from glm5_ascend.deploy.rules.load import Rule, Symptom, Topic, rules, threads
from glm5_ascend.files.resources import data_dir

NAME = "TROUBLESHOOTING.md"
THREADS = "https://github.com/vllm-project/vllm-ascend/issues/"
HEAD = """\
# Troubleshooting

Written by `python -m glm5_ascend.deploy.troubleshooting` from [rules.yaml](rules.yaml) and
[threads.yaml](threads.yaml): change it there. First by symptom, then every rule by topic.

`glm5-ascend doctor DIR --profile NAME` checks all of these for your machine, checkpoint and flags.
Error: the engine refuses it, or its results are wrong; `serve` refuses it, too. Warning: a known problem.
A cause is a condition over the names at the end of this page; `{name}` stands for the value of a name.
"""
COLUMNS = "| | symptom | cause | fix | source |\n|---|---|---|---|---|\n"


def page() -> str:
    """The whole file: a table per symptom, a table per topic with errors first, and the names in causes."""
    parts = [HEAD, *map(symptom_table, get_args(Symptom))]
    for topic in get_args(Topic):
        selected = sorted((rule for rule in rules() if rule.topic == topic), key=lambda rule: rule.level)
        parts.append(f"## {topic[0].upper()}{topic[1:]}\n\n{COLUMNS}{''.join(map(row, selected))}")
    used = {name for rule in rules() for name in names_in(rule.when)}
    names = [f"| `{name}` | {meaning} |\n" for name, meaning in FACTS.items() if name in used]
    return "\n".join([*parts, "## Names in causes\n\n| name | meaning |\n|---|---|\n" + "".join(names)])


def symptom_table(symptom: Symptom) -> str:
    """Causes that a user with this symptom should look at: what users report, then the rules."""
    rows = [(thread.says, thread.do, thread.source) for thread in threads() if thread.symptom == symptom]
    for rule in rules():
        if symptom in rule.symptoms:
            rows.append((f"{rule.id}: {_marked(rule.message)}", _marked(rule.fix), rule.source))
    table = "".join(_cells(cause, fix, _linked(source)) for cause, fix, source in rows)
    return f"## {symptom[0].upper()}{symptom[1:]}\n\n| cause | what to do | threads |\n|---|---|---|\n{table}"


def row(rule: Rule) -> str:
    """One line of a table, with links to vllm-ascend's threads."""
    source = _linked(rule.known_from)
    return _cells(f"{rule.id} {rule.level}", _marked(rule.message), f"`{rule.when}`", _marked(rule.fix), source)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _marked(text: str) -> str:
    return re.sub(r"(\{\w+\})", r"`\1`", text).replace("*", "\\*")


def _linked(source: str) -> str:
    """Numbers as links; after the name of another project they are its own."""
    return re.sub(r"(?<!sglang )(?<!gpustack )#(\d+)", rf"[#\1]({THREADS}\1)", source)


def main() -> None:
    """Write the file again."""
    path = data_dir("data/deploy") / NAME
    path.write_text(page(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
