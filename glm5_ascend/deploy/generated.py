"""Files of deploy/ that are written from others: JSON schemas for editors, and TROUBLESHOOTING.md from the rules.

`python -m glm5_ascend.deploy.generated` writes them.
"""

from __future__ import annotations

import re
from typing import get_args

from pydantic import BaseModel

from glm5_ascend.deploy.profiles.file import ProfileFile
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rules.load import ERROR, RuleFile, Symptom, ThreadFile, Topic, rules, threads
from glm5_ascend.files.resources import data_dir, write_schemas

#: By file name in deploy/schemas.
SCHEMAS: dict[str, type[BaseModel]] = {
    "profile.json": ProfileFile,
    "rules.json": RuleFile,
    "threads.json": ThreadFile,
    "values.json": PodValues,
}
THREADS = "https://github.com/vllm-project/vllm-ascend/issues/"
HEAD = """\
# Troubleshooting

Written by `python -m glm5_ascend.deploy.generated` from [rules.yaml](rules.yaml) and
[threads.yaml](threads.yaml). `glm5-ascend doctor DIR --profile NAME` finds every line with a number on your machine,
and names its source. **Bold**: refused by the engine or wrong results; `serve` refuses it, too. `{name}` stands for
your value. After the arrow: what to do.
"""


def page() -> str:
    """The whole file: what users see, then what `doctor` alone sees, by topic. Every rule stands once."""
    chapters: dict[str, list[str]] = {title: [] for title in (*get_args(Symptom), *get_args(Topic))}
    for thread in threads():
        chapters[thread.symptom].append(entry(thread.says, thread.do, thread.source))
    for rule in rules():
        mark = f"**{rule.id}**" if rule.level == ERROR else rule.id
        line = entry(f"{mark} {_marked(rule.message)}", _marked(rule.fix), rule.source)
        chapters[rule.symptoms[0] if rule.symptoms else rule.topic].append(line)
    for symptom in get_args(Symptom):
        if others := [rule.id for rule in rules() if symptom in rule.symptoms[1:]]:
            chapters[symptom].append(f"- See also {', '.join(others)}.\n")
    texts = (f"\n## {title[0].upper()}{title[1:]}\n\n{''.join(lines)}" for title, lines in chapters.items() if lines)
    return HEAD + "".join(texts)


def entry(cause: str, fix: str, source: str) -> str:
    """One line, with links to vllm-ascend's threads; a number after the name of another project is its own."""
    ours = re.sub(r"\b(sglang|gpustack|vLLM)( PR)? #\d+", "", source)
    links = (f"[#{issue}]({THREADS}{issue})" for issue in re.findall(r"#(\d+)", ours))
    return " ".join([f"- {cause} → {fix}", *links]) + "\n"


def _marked(text: str) -> str:
    return re.sub(r"(\{\w+\})", r"`\1`", text).replace("*", "\\*")


def main() -> None:
    folder = data_dir("data/deploy")
    write_schemas(folder / "schemas", SCHEMAS)
    (folder / "TROUBLESHOOTING.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
