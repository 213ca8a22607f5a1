"""The engine that is installed here: its line, and the table of its flags."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from packaging.version import Version

from glm5_ascend.engine_lines import CPU, VLLM_CPU_032, EngineLine, vllm_ascend_line
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve import engine_parser
from glm5_ascend.serve.environment import version_of
from glm5_ascend.serve.flag_types import FlagTable, flag_table

#: Seconds for an engine to import itself and build its parser: 10 on a CPU; an Atlas starts its runtime, too.
PARSER_LIMIT = 120


def line_here() -> EngineLine:
    """The engine line of a server without a profile: of the installed vllm-ascend, or vLLM's for CPUs."""
    installed = version_of("vllm-ascend")
    return VLLM_CPU_032 if installed is None else vllm_ascend_line(Version(installed))


def installed_table(line: EngineLine) -> FlagTable:
    """The table of flags of a line.

    Where its engine is installed in a version that the table is not of, the flags of that engine's own parser; if the
    parser cannot be asked, the line's table without a check of what it does not know.
    """
    table = flag_table(line.flags)
    if not version_without_table(line):
        return table
    parsers = parser_table(sys.executable, line.engine)
    return table.loosened() if isinstance(parsers, str) else parsers


def version_without_table(line: EngineLine) -> str:
    """The engine's name and version if the line's engine is installed in one of another line; empty otherwise."""
    for name in (line.distribution, "vllm") if line.platform == CPU else (line.distribution,):
        installed = version_of(name)
        if installed is not None and not line.covers(Version(installed)):
            return f"{name} {installed}"
    return ""


def table_note(line: EngineLine) -> str:
    """A sentence for the user of an engine without a table: who checks the flags; empty if there is a table."""
    installed = version_without_table(line)
    if not installed:
        return ""
    versions = f"{installed} is installed, our table of flags is of {flag_table(line.flags).engine}"
    parsers = parser_table(sys.executable, line.engine)
    if isinstance(parsers, str):
        return (
            f"{versions}: flags, keys and values that it does not have are not refused, "
            f"because the engine's own parser gives no answer ({parsers})"
        )
    return f"{versions}: the flags are checked by the engine's own parser"


@cache
def parser_table(python: str, engine: str) -> FlagTable | str:
    """The flags that the parser of an interpreter's engine takes, or why they cannot be read, as half a sentence."""
    with tempfile.TemporaryDirectory(prefix="glm5-parser-") as name:
        folder = Path(name)
        (folder / engine_parser.NAME).symlink_to(engine_parser.FOLDER)
        argv = [python, "-m", f"{engine_parser.NAME}.flags", str(folder / "flags.json"), engine]
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        variables = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, env=variables, timeout=PARSER_LIMIT, check=False, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return f"none within {PARSER_LIMIT} s"
        if done.returncode:
            return done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
        content = parse_json((folder / "flags.json").read_bytes())
    return FlagTable.of(content)
