"""`glm5-ascend chat [URL]`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from glm5_ascend.cli.command import Output, command
from glm5_ascend.errors import Glm5Error, printable, shortened
from glm5_ascend.options import Argument

if TYPE_CHECKING:
    from rich.console import Console

    from glm5_ascend.serve.conversation import Conversation, Piece

HELP = """\
/think on|off   think before the answer, or not
/clear          delete the conversation
/quit           quit (or Ctrl-D); Ctrl-C stops an answer"""
#: Control characters in an answer could rewrite the terminal; tabs and line ends are text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class ChatOptions:
    """Options of `chat`."""

    url: Annotated[str, Argument("[URL]", "Server or router, http://HOST:PORT.")] = "http://127.0.0.1:8000"


@command("chat", "chat", "chat http://127.0.0.1:8000")
def run(options: ChatOptions, output: Output) -> int:
    """Talk to a served GLM-5: streamed answers, dimmed thinking. OPENAI_API_KEY: the server's key."""
    from glm5_ascend.report.terminal import text_console
    from glm5_ascend.serve.conversation import connect

    console = text_console()
    conversation = connect(options.url, os.environ.get("OPENAI_API_KEY", ""))
    name = printable(shortened(conversation.model))
    console.print(f"{name} at {options.url}   /help for commands, Ctrl-D to end", style="dim")
    _talk(conversation, console)
    return 0


def _talk(conversation: Conversation, console: Console) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and the arrow keys at the prompt
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        try:
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                _command(line, conversation, console)
            elif line:
                _show(conversation, conversation.ask(line), console)
        except Glm5Error as error:
            tip = f"\n  fix: {printable(error.tip)}" if error.tip else ""
            console.print(printable(f"error: {error.message}") + tip)
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")


def _show(conversation: Conversation, pieces: Iterator[Piece], console: Console) -> None:
    from glm5_ascend.serve.conversation import THINKING

    start, last = 0.0, ""
    for channel, text in pieces:
        start = start or time.monotonic()  # of decoding: the prompt and a first compilation come before
        if last and channel != last:
            console.print()
        style = "dim" if channel == THINKING else ""
        console.print(_CONTROL.sub("\ufffd", text), style=style, end="", soft_wrap=True)
        last = channel
    seconds, (prompt, completion) = time.monotonic() - start, conversation.usage
    console.print(f"\n[{prompt} + {completion} tokens, {completion / max(seconds, 1e-9):.1f} tokens/s]", style="dim")


def _command(line: str, conversation: Conversation, console: Console) -> None:
    name, _, value = line[1:].partition(" ")
    value = value.strip()
    if name == "think" and value in ("on", "off"):
        conversation.thinking = value == "on"
        console.print(f"thinking {value}")
    elif name == "clear":
        conversation.messages.clear()
        console.print("deleted")
    else:
        console.print(HELP, soft_wrap=True)
