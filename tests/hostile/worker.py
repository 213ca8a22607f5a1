"""Runs command lines one after the other within limits of memory: `python -m tests.hostile.worker`.

A line of JSON on standard input is a list of words; the answer is a line of JSON: exit code, both outputs.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout

MEMORY_BYTES = 6 * 2**30


def main() -> None:
    from glm5_ascend.cli import run

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        out, err = io.StringIO(), io.StringIO()
        code: object
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = run(json.loads(line))
        except SystemExit as error:
            code = error.code
        except BaseException:
            code = traceback.format_exc()
        answers.write(json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
