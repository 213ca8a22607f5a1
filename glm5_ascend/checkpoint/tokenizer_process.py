"""A checkpoint's tokenizer and chat template, which anybody may have written, in a process of their own.

A normalizer can grow a text without end, a regular expression or a template can compute for ever: such a process is
ended at a limit of memory, processor time or length of its answer, and the command says so in one line. A signal to the
command is heard at once, whatever the tokenizer does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.errors import CheckpointError, TextError
from glm5_ascend.files.untrusted import parse_json

#: Of the process; transformers with torch take 1 GB of it.
MEMORY_BYTES = 6 * 1024**3
#: Processor time for one piece of text, or one chat; loading included.
CPU_SECONDS = 60
#: Of one answer; 64 KiB of text become some 200 KiB of ids.
ANSWER_BYTES = 64 * 1024**2
#: The parent's own way to modules; nothing is taken from the current folder.
_PROGRAM = (
    f"import sys; sys.path[:] = sys.argv.pop().split({os.pathsep!r}); "
    "from glm5_ascend.checkpoint.tokenizer_child import main; main()"
)
_FIX = "copy the tokenizer files again"


class SourceTokenizer:
    """The checkpoint's own tokenizer and chat template; the process starts with the first text.

    Raises:
        CheckpointError: no usable tokenizer in `source`, or one that passes a limit.
        TextError: it refuses a text or chat; says why.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self._process: subprocess.Popen[bytes] | None = None

    def encode(self, text: str) -> list[int]:
        """Token ids, no special tokens added."""
        return list(self._ask("encode", text))

    def decode(self, ids: torch.Tensor) -> str:
        return str(self._ask("decode", ids.tolist()))

    def render(self, messages: list[Any], tools: Any) -> str:
        """The chat template's text."""
        return str(self._ask("render", {"messages": messages, "tools": tools}))

    def _ask(self, what: str, value: Any) -> Any:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended; what follows says how
            process.stdin.write(json.dumps([what, value]).encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline(ANSWER_BYTES)
        if not line.endswith(b"\n"):
            self._process = None
            if len(line) >= ANSWER_BYTES:
                process.kill()
            raise CheckpointError(f"{self.source}: {_ended(process.wait(), len(line))}", _FIX)
        answer = parse_json(line)
        if "file" in answer:
            raise CheckpointError(
                f"{self.source / answer['file']}: transformers cannot read it: {answer['unusable']}",
                "correct the key, or use the config.json of the original checkpoint",
            )
        if "unusable" in answer:
            raise CheckpointError(f"{self.source}: tokenizer cannot be loaded: {answer['unusable']}", _FIX)
        if "refused" in answer:
            raise TextError(f"{self.source}: the tokenizer refuses a text: {answer['refused']}", "correct it")
        return answer["made"]

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [str(self.source), str(MEMORY_BYTES), str(CPU_SECONDS), os.pathsep.join(sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the command's business
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):  # something was left to write
            if pipe is not None:
                pipe.close()


def _ended(code: int, length: int) -> str:
    what = "its tokenizer or chat template"
    if length >= ANSWER_BYTES:
        return f"{what} gives more than {ANSWER_BYTES // 1024**2} MiB for one text"
    if code == -signal.SIGXCPU:
        return f"{what} computed for {CPU_SECONDS} s without an answer"
    memory = f"{MEMORY_BYTES / 1024**3:.0f} GiB of memory"
    return f"{what} needs more than {memory}, or crashes the library (exit status {code})"
