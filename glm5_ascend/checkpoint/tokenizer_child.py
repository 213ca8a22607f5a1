"""The other side of `tokenizer_process`: loads a stranger's tokenizer and chat template, within limits, and answers.

One request per line of standard input, one answer per line of standard output, both JSON. Imports no torch by itself.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any


class OwnTokenizer:
    """The checkpoint's own tokenizer and chat template.

    transformers takes seconds to import; where there is a tokenizer.json, which holds all that plain text needs, it is
    only loaded for messages.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._quick = source / "tokenizer.json"

    @cached_property
    def _fast(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._quick))

    @cached_property
    def _whole(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._source), local_files_only=True, trust_remote_code=False)

    def load(self, what: str) -> None:
        """All that `what` needs."""
        _ = self._fast if what == "encode" and self._quick.is_file() else self._whole

    def encode(self, text: str) -> list[int]:
        if self._quick.is_file():
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        return list(self._whole(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._whole.decode(ids))

    def render(self, chat: dict[str, Any]) -> str:
        return str(self._whole.apply_chat_template(chat["messages"], tools=chat["tools"], tokenize=False))


def main() -> None:
    """`SOURCE MEMORY_BYTES CPU_SECONDS` in sys.argv."""
    source, memory, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with suppress(ValueError, OSError):  # macOS
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    try:
        tempfile.gettempdir()
    except OSError:  # libraries ask for its name when they are imported, and write nothing
        tempfile.tempdir = "/tmp"
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # a library that prints spoils no answer
    tokenizer = OwnTokenizer(source)
    for line in sys.stdin:
        _renew(seconds)
        answers.write(json.dumps(answer(tokenizer, *json.loads(line))) + "\n")
        answers.flush()


def _renew(seconds: int) -> None:
    """Let this process end by SIGXCPU when it has computed for so long from now on, however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def answer(tokenizer: OwnTokenizer, what: str, value: Any) -> dict[str, Any]:
    """{"made": ...}, or why not: {"unusable": ...} of the files, {"refused": ...} of this text."""
    act: Callable[[Any], Any] = getattr(tokenizer, what)
    try:
        tokenizer.load(what)
    except MemoryError:
        os._exit(1)  # the parent knows what that means
    except BaseException as error:  # both libraries raise anything on damaged files; Rust's panics are no Exception
        return {"unusable": _reason(error)}
    try:
        return {"made": act(value)}
    except MemoryError:
        os._exit(1)
    except BaseException as error:  # jinja raises its own family
        return {"refused": _reason(error)}


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error).strip() else type(error).__name__
