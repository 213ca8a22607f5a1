"""`glm5-ascend chat [URL | DIR]`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from glm5_ascend.cli.command import Output, command
from glm5_ascend.errors import ConfigError, Glm5Error, printable, shortened
from glm5_ascend.options import Argument

if TYPE_CHECKING:
    from rich.console import Console

    from glm5_ascend.serve.conversation import Conversation, Piece

HELP = """\
/think on|off   think before the answer, or not
/tools FILE     function definitions (JSON list) that the model may call; /tools off
/clear          delete the conversation
/history        print the conversation
/save FILE      write the conversation as JSON
/quit           quit (or Ctrl-D); Ctrl-C stops an answer"""
#: Control characters in an answer could rewrite the terminal; tabs and line ends are text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class ChatOptions:
    """Options of `chat`."""

    target: Annotated[str, Argument("[URL|DIR]", "A server, or a checkpoint that is served during the chat.")] = (
        "http://127.0.0.1:8000"
    )


@command("chat", "chat", "chat http://127.0.0.1:8000", "chat glm5-w4a8")
def run(options: ChatOptions, output: Output) -> int:
    """Talk to a served GLM-5: streamed answers, dimmed thinking, tools, history. OPENAI_API_KEY: the server's key."""
    from glm5_ascend.report.terminal import text_console
    from glm5_ascend.serve.conversation import connect

    console = text_console()
    with _served(options.target, console) as url:
        conversation = connect(url, os.environ.get("OPENAI_API_KEY", ""))
        name = printable(shortened(conversation.model))
        console.print(f"{name} at {url}   /help for commands, Ctrl-D to end", style="dim")
        _talk(conversation, console)
    return 0


@contextlib.contextmanager
def _served(target: str, console: Console) -> Iterator[str]:
    if target.startswith(("http://", "https://")):
        yield target
        return
    if not os.path.isdir(target):
        raise ConfigError(
            f"{shortened(target, 300)}: neither a URL nor a directory",
            "give http://HOST:PORT, or a checkpoint's directory",
        )
    from rich.text import Text

    from glm5_ascend.serve.local_server import server
    from glm5_ascend.serve.servable import check_directory, check_name

    check_directory(Path(target))
    check_name(Path(target))
    with tempfile.TemporaryDirectory(prefix="glm5-chat-") as folder, contextlib.ExitStack() as stack:
        with console.status(Text(f"starting a server for {printable(target)} ...")):
            port = stack.enter_context(server(Path(target), Path(folder) / "serve.log"))
        yield f"http://127.0.0.1:{port}"


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
                _answer(conversation, conversation.ask(line), console)
        except Glm5Error as error:
            tip = f"\n  fix: {printable(error.tip)}" if error.tip else ""
            console.print(printable(f"error: {error.message}") + tip)
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")


def _answer(conversation: Conversation, pieces: Iterator[Piece], console: Console) -> None:
    while True:
        _show(conversation, pieces, console)
        calls = conversation.open_calls()
        if not calls:
            return
        for call_id, shown in calls:
            conversation.tool_result(call_id, input(f"result of {_CONTROL.sub('?', shown)}: "))
        pieces = conversation.answer()


def _show(conversation: Conversation, pieces: Iterator[Piece], console: Console) -> None:
    from glm5_ascend.serve.conversation import THINKING, TOOL_CALL

    start, last = 0.0, ""
    for channel, text in pieces:
        start = start or time.monotonic()  # of decoding: the prompt and a first compilation come before
        if last and channel != last:
            console.print()
        shown = f"call {text}" if channel == TOOL_CALL else text
        style = {THINKING: "dim", TOOL_CALL: "cyan"}.get(channel, "")
        console.print(_CONTROL.sub("\ufffd", shown), style=style, end="", soft_wrap=True)
        last = channel
    seconds, (prompt, completion) = time.monotonic() - start, conversation.usage
    console.print(f"\n[{prompt} + {completion} tokens, {completion / max(seconds, 1e-9):.1f} tokens/s]", style="dim")


def _command(line: str, conversation: Conversation, console: Console) -> None:
    name, _, value = line[1:].partition(" ")
    value = value.strip()
    if name == "think" and value in ("on", "off"):
        conversation.thinking = value == "on"
        console.print(f"thinking {value}")
    elif name == "tools" and value:
        conversation.tools = [] if value == "off" else _read_tools(Path(value))
        console.print(f"{len(conversation.tools)} tools")
    elif name == "clear":
        conversation.messages.clear()
        console.print("deleted")
    elif name == "history":
        for message in conversation.messages:
            text = message.get("content") or json.dumps(message.get("tool_calls"))
            console.print(f"{message['role']:<10} {_CONTROL.sub('?', str(text))}")
    elif name == "save" and value:
        conversation.save(Path(value))
        console.print(f"wrote {value}")
    else:
        console.print(HELP, soft_wrap=True)


def _read_tools(path: Path) -> list[dict[str, Any]]:
    from glm5_ascend.files.untrusted import MAX_CONFIG_BYTES, read_json

    tools = read_json(path, max_bytes=MAX_CONFIG_BYTES, error=ConfigError, fix="give a JSON file")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise ConfigError(f"{path}: not a list of tools", 'e.g. [{"type": "function", "function": {"name": ...}}]')
    return tools
