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
        messages = [_as_served(message) for message in chat["messages"]]
        return str(self._whole.apply_chat_template(messages, tools=chat["tools"], tokenize=False))

    def config_defect(self) -> str | None:
        """Why transformers cannot read config.json, which a tokenizer needs as well; None if it can."""
        from transformers import AutoConfig

        try:
            AutoConfig.from_pretrained(str(self._source), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            return _reason(error)
        return None


def _as_served(message: Any) -> Any:
    """A message as vLLM 0.32 gives it to the template with our flags (`renderers/chat_utils.py`, content as string).

    Arguments of tool calls are parsed, because templates walk over their keys; an absent content is an empty one.
    """
    if not isinstance(message, dict):
        return message
    message = dict(message)
    content = message.get("content")
    if content is None:
        message["content"] = ""
    elif isinstance(content, list) and all(isinstance(part, dict) for part in content):
        message["content"] = "\n".join(str(part["text"]) for part in content if isinstance(part.get("text"), str))
    if message.get("role") != "assistant":
        return message
    if isinstance(message.get("reasoning"), str):
        message["reasoning_content"] = message["reasoning"]
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    elif isinstance(message["tool_calls"], list):
        message["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
    return message


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {}
    return call | {"function": function | {"arguments": arguments if isinstance(arguments, dict) else {}}}


def main() -> None:
    """`SOURCE MEMORY_BYTES CPU_SECONDS` in sys.argv."""
    memory, seconds = int(sys.argv[2]), int(sys.argv[3])
    sys.path[:] = map(os.path.abspath, sys.path)
    os.chdir(sys.argv[1])  # the libraries open no path that is not UTF-8, but any file by its name
    source = Path()
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
        of_config = tokenizer.config_defect()
        return {"unusable": _reason(error)} if of_config is None else {"unusable": of_config, "file": "config.json"}
    try:
        return {"made": act(value)}
    except MemoryError:
        os._exit(1)
    except BaseException as error:  # jinja raises its own family
        return {"refused": _reason(error)}


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error).strip() else type(error).__name__
