"""Writes deploy/flags/NAME.json, the flags that an engine's own parser takes.

    python -m glm5_ascend.deploy.flag_tables NAME PYTHON

NAME: `flags` of a row of engine_lines.py. PYTHON: interpreter that has this engine, for example that of the folder
which `glm5-ascend rehearse --prepare` makes, or of the contract tests' SGLang.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from glm5_ascend.deploy.rules.facts import OLD_SGLANG_FLAGS
from glm5_ascend.engine_lines import LINES, SGLANG, SGLANG_05, VLLM, VLLM_CPU_032
from glm5_ascend.files.resources import data_dir
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.flag_table import flag_table


def table(name: str, python: Path) -> dict[str, Any]:
    """The table of the engine that an interpreter has.

    AscendConfig has no typed field for some keys of --additional-config: for none in vllm-ascend 0.23
    (ascend_config.py), and in 0.30 not for those that its maker takes out (ascend_config.py:1846). They are kept from
    the file as it is.
    """
    engine = SGLANG if name == SGLANG_05.flags else VLLM
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "flags.json")
        RehearsalEnvironment(python).run("glm5_rehearsal.flags", path, engine)
        content: dict[str, Any] = parse_json(path.read_bytes())
    flags = content["flags"]
    if engine == SGLANG:  # rule S3 names their replacements
        flags |= dict.fromkeys(OLD_SGLANG_FLAGS, "list")
    if "additional-config" in flags and name != VLLM_CPU_032.flags:
        keys = flags["additional-config"]
        previous = flag_table(name).flags["additional-config"]
        flags["additional-config"] = {**previous, **(keys if isinstance(keys, dict) else {})}
    return content


def text(content: dict[str, Any]) -> str:
    """The file: one flag per line."""
    sections = []
    for key, value in content.items():
        rows = value.items() if isinstance(value, dict) else ()
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(flag_type)}" for name, flag_type in rows)
        sections.append(f"  {json.dumps(key)}: " + (f"{{\n{lines}\n  }}" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> None:
    name, python = sys.argv[1], Path(sys.argv[2]).absolute()
    tables = sorted(line.flags for line in LINES.values())
    if name not in tables:
        sys.exit(f"{name}: one of {', '.join(tables)}")
    path = data_dir("data/deploy/flags") / f"{name}.json"
    path.write_text(text(table(name, python)), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
