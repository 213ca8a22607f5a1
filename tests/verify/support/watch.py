"""Verifies directories in a process that writes down what Python does meanwhile: `python watch.py REPORT WARM DIR...`.

A correct checkpoint WARM is verified first, so that what is imported late is imported before the watch begins. At the
end a control opens a file and runs code, which the report must show.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

#: Audit events (PEP 578) of code that runs and of things that are reached for.
RUNS = ("exec", "compile", "pickle.", "marshal.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn",
        "os.fork", "os.startfile", "socket.", "ctypes.", "urllib.", "http.", "ftplib.", "code.")  # fmt: skip
OPENS = (
    "open",
    "os.listdir",
    "os.scandir",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.truncate",
    "os.link",
    "os.symlink",
)


def main() -> None:
    report, warm, *directories = map(Path, sys.argv[1:])
    from glm5_ascend.errors import Glm5Error
    from glm5_ascend.verify import verify

    verify(warm)
    "warm".encode("unicode_escape")  # Python imports this codec when it is first needed
    seen: list[tuple[str, str]] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(RUNS) or event in OPENS:
            first = arguments[0] if arguments else ""
            seen.append((event, os.fsdecode(first) if isinstance(first, str | bytes) else repr(first)))

    sys.addaudithook(watch)
    results: dict[str, Any] = {}
    for directory in directories:
        seen.clear()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            checked = verify(directory)
            code, text = checked.exit_code, checked.lines() + [line for f in checked.findings for line in [f.line()]]
            json.dumps(checked.to_dict(), allow_nan=False)
        except Glm5Error as error:
            code, text = error.exit_code, [error.message]
        except Exception as error:
            code, text = -1, [repr(error)]
        happened = list(seen)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        results[directory.name] = {"code": code, "text": text, "events": happened, "grown_kb": grown}
    seen.clear()
    (report.parent / "control").write_text("seen")
    eval("1 + 1")
    results["control"] = list(seen)
    report.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
