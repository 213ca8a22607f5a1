"""A checkpoint's own tokenizer and chat template, which anybody may have written, used within limits.

A normalizer that grows texts is refused before a library loads it, because it runs while it is loaded. A regular
expression or a template can compute for ever: they run in a thread, while the caller watches processor time and memory,
hears signals, and gives up with one line. A thread that it gives up ends with the command.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import psutil

from glm5_ascend.errors import CheckpointError, Glm5Error, TextError, shortened
from glm5_ascend.files.untrusted import MAX_BYTES, MIB, parse_json, read_bytes, read_json_object

T = TypeVar("T")
#: Processor time for loading, and for one piece of text or one chat (a real one takes 0.1 s).
CPU_SECONDS, ANSWER_SECONDS = 20, 5
#: Growth of the process meanwhile.
MEMORY_BYTES = 1024**3
#: Files that transformers may read.
_READ = ("*token*", "*.jinja", "config.json", "vocab*", "merges.txt", "additional_chat_templates/*")
_POLL_S = 0.02
#: How many times as long a normalizer may make a text, and the longest added token.
_GROWTH, _TOKEN = 64, 1024
_FIX = "copy the tokenizer files again"


class SourceTokenizer:
    """The checkpoint's own tokenizer and chat template.

    transformers takes seconds to import; a tokenizer.json holds all that plain text needs.

    Raises:
        CheckpointError: no usable tokenizer in `source`, or one that passes a limit.
        TextError: it refuses a text or chat; says why.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self._file = source / "tokenizer.json"

    def encode(self, text: str) -> list[int]:
        """Token ids, no special tokens added."""
        if self._file.exists():
            # Other than `encode`, it lets this thread's caller run.
            return list(self._use("_fast", lambda fast: fast.encode_batch([text], add_special_tokens=False)[0].ids))
        return list(self._use("_whole", lambda whole: whole(text, add_special_tokens=False)["input_ids"]))

    def render(self, messages: list[Any], tools: Any) -> str:
        chat = [as_served(message) for message in messages]
        with _data_limit():
            return str(self._use("_whole", lambda whole: whole.apply_chat_template(chat, tools=tools, tokenize=False)))

    @cached_property
    def _fast(self) -> Any:
        from tokenizers import Tokenizer

        self._require_bounded()
        tokenizer = Tokenizer.from_str(read_bytes(self._file, MAX_BYTES, CheckpointError, _FIX).decode("utf-8"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def _whole(self) -> Any:
        for path in (path for pattern in _READ for path in self.source.glob(pattern)):
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                raise CheckpointError(f"{path}: not a file, or larger than {MAX_BYTES // MIB} MiB", _FIX)
        self._require_bounded()
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)

    @cached_property
    def _folder(self) -> str:
        """The path for transformers; its Rust opens none that is not UTF-8, but the same folder by its descriptor."""
        try:
            return str(self.source).encode("utf-8").decode("utf-8")
        except UnicodeEncodeError:
            return f"/proc/self/fd/{os.open(self.source, os.O_RDONLY)}"

    def _require_bounded(self) -> None:
        """Raise `CheckpointError` for a tokenizer.json that takes long, or much memory, while it is loaded."""
        if not self._file.exists():
            return
        tokenizer = read_json_object(self._file, fix=_FIX)
        added = tokenizer.get("added_tokens")
        if (growth := _growth(tokenizer.get("normalizer"))) > _GROWTH:
            raise CheckpointError(f"{self._file}: its normalizer can make a text {growth} times as long", _FIX)
        for token in added if isinstance(added, list) else ():
            content = token.get("content") if isinstance(token, dict) else None
            if isinstance(content, str) and len(content) > _TOKEN:
                raise CheckpointError(f"{self._file}: an added token has {len(content)} characters", _FIX)

    def _use(self, name: str, act: Callable[[Any], T]) -> T:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if name == "_whole":
            from transformers import AutoTokenizer  # noqa: F401  # its seconds and memory are no stranger's
        tokenizer, problem = self._within_limits(lambda: getattr(self, name), CPU_SECONDS)
        if problem is not None:
            if isinstance(problem, Glm5Error):
                raise problem
            raise CheckpointError(f"{self.source}: tokenizer cannot be loaded: {_reason(problem)}", _FIX)
        answer, problem = self._within_limits(lambda: act(tokenizer), min(ANSWER_SECONDS, CPU_SECONDS))
        if problem is not None:
            raise TextError(f"{self.source}: the tokenizer refuses a text: {_reason(problem)}", "correct it")
        return answer  # type: ignore[return-value]

    def _within_limits(self, act: Callable[[], T], limit: float) -> tuple[T | None, BaseException | None]:
        """Return what a call returns or raises: both libraries raise anything. Raises CheckpointError at a limit."""
        ended: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                ended.append((act(), None))
            except BaseException as error:  # Rust's panics are no Exception
                ended.append((None, error))

        process, thread = psutil.Process(), threading.Thread(target=run, daemon=True)
        used, memory, problem = time.process_time(), process.memory_info().rss, ""
        with _without_stderr():
            thread.start()
            while not ended and not problem:
                thread.join(_POLL_S)
                if time.process_time() - used > limit:
                    problem = f"computed for {limit} s without an answer"
                if process.memory_info().rss > memory + MEMORY_BYTES:
                    problem = f"needs more than {MEMORY_BYTES / 1024**3:.0f} GiB of memory"
        if not ended or isinstance(ended[0][1], MemoryError):
            raise CheckpointError(f"{self.source}: its tokenizer or chat template {problem or 'needs too much'}", _FIX)
        return ended[0]


def _growth(normalizer: Any) -> int:
    """The largest factor by which a normalizer of tokenizer.json can make a text longer, by what it puts in."""
    if not isinstance(normalizer, dict):
        return 1
    steps = normalizer.get("normalizers")
    contents = (normalizer.get("content"), normalizer.get("prepend"))
    growth = math.prod(max(1, len(content)) for content in contents if isinstance(content, str))
    return growth * math.prod(map(_growth, steps if isinstance(steps, list) else ()))


def as_served(message: Any) -> Any:
    """A message as vLLM 0.32 gives it to the template with our flags (`renderers/chat_utils.py`, content as string).

    Arguments of tool calls are parsed, because templates walk over their keys; an absent content is an empty one.
    """
    if not isinstance(message, dict):
        return message
    message = dict(message)
    content = message.get("content")
    if content is None:
        message["content"] = ""
    elif isinstance(content, list) and all(isinstance(item, dict) for item in content):
        message["content"] = "\n".join(str(item["text"]) for item in content if isinstance(item.get("text"), str))
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
            arguments = parse_json(arguments or "{}")
        except ValueError:
            arguments = {}
    return call | {"function": function | {"arguments": arguments if isinstance(arguments, dict) else {}}}


@contextmanager
def _data_limit() -> Iterator[None]:
    """Let Python raise MemoryError for a text of many GiB, which one step of a template can make."""
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    from transformers import AutoTokenizer  # noqa: F401  # counted before, not as the template's

    limit = psutil.Process().memory_info().data + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop what libraries write to standard error, such as the message of a panic in Rust."""
    with open(os.devnull, "wb") as nowhere, os.fdopen(os.dup(2), "wb") as stderr:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr.fileno(), 2)


def _reason(error: BaseException) -> str:
    with suppress(IndexError):
        return shortened(str(error).strip().splitlines()[0], 200)
    return type(error).__name__
