"""deploy/TROUBLESHOOTING.md, from the rules of `doctor` and the threads of users.

`python -m glm5_ascend.deploy.troubleshooting` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import get_args

from glm5_ascend.deploy.rules.load import ERROR, Rule, Symptom, Topic, rules, threads
from glm5_ascend.files.resources import data_dir

NAME = "TROUBLESHOOTING.md"
THREADS = "https://github.com/vllm-project/vllm-ascend/issues/"
HEAD = """\
# Troubleshooting

Written by `python -m glm5_ascend.deploy.troubleshooting` from [rules.yaml](rules.yaml) and
[threads.yaml](threads.yaml). `glm5-ascend doctor DIR --profile NAME` finds every line with a number on your machine,
and names its source. **Bold**: refused by the engine or wrong results; `serve` refuses it, too. `{name}` stands for
your value. After the arrow: what to do.
"""


def page() -> str:
    """The whole file: what users see, then what `doctor` alone sees, by topic. Every rule stands once."""
    sections = [(symptom, symptom_lines(symptom)) for symptom in get_args(Symptom)]
    for topic in get_args(Topic):
        sections.append((topic, [line(rule) for rule in rules() if rule.topic == topic and not rule.symptoms]))
    chapters = [f"\n## {title[0].upper()}{title[1:]}\n\n{''.join(lines)}" for title, lines in sections if lines]
    return HEAD + "".join(chapters)


def symptom_lines(symptom: Symptom) -> list[str]:
    """Reports of users, then the rules whose first symptom it is, then the numbers of the others."""
    lines = [entry(thread.says, thread.do, thread.source) for thread in threads() if thread.symptom == symptom]
    lines += [line(rule) for rule in rules() if rule.symptoms[:1] == [symptom]]
    others = [rule.id for rule in rules() if symptom in rule.symptoms[1:]]
    return [*lines, f"- See also {', '.join(others)}.\n"] if others else lines


def line(rule: Rule) -> str:
    """A rule with links to vllm-ascend's threads."""
    mark = f"**{rule.id}**" if rule.level == ERROR else rule.id
    return entry(f"{mark} {_marked(rule.message)}", _marked(rule.fix), rule.source)


def entry(cause: str, fix: str, source: str) -> str:
    return " ".join([f"- {cause} → {fix}", *_links(source)]) + "\n"


def _marked(text: str) -> str:
    return re.sub(r"(\{\w+\})", r"`\1`", text).replace("*", "\\*")


def _links(source: str) -> Iterable[str]:
    """Threads of vllm-ascend; a number after the name of another project is its own."""
    ours = re.sub(r"\b(sglang|gpustack|vLLM)( PR)? #\d+", "", source)
    return (f"[#{issue}]({THREADS}{issue})" for issue in re.findall(r"#(\d+)", ours))


def main() -> None:
    """Write the file again."""
    path = data_dir("data/deploy") / NAME
    path.write_text(page(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
