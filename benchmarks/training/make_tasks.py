"""Write the demo model's held-out questions as files that `eval` takes, each with its family of tasks.

    python -m benchmarks.training.make_tasks prompts.jsonl               # for eval --url A --against-url B --prompts
    python -m benchmarks.training.make_tasks texts.jsonl --texts -n 700  # for eval DIR --against SRC --text

Texts are whole chats, the right answer included. Files for a real model look the same: a JSON object a line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .held_out import Question, held_out_questions


def prompt(question: Question) -> dict[str, Any]:
    """One line of --prompts."""
    record: dict[str, Any] = {"task": question.category, "messages": question.messages, "expected": question.expected}
    if question.tools:
        record["tools"] = question.tools
    return record | {"chat_template_kwargs": {"enable_thinking": question.enable_thinking}}


def text(question: Question) -> dict[str, Any]:
    """One line of --text: the chat with its answer."""
    answer: dict[str, Any] = {"role": "assistant", "content": question.expected}
    if isinstance(question.expected, dict):
        answer |= {"content": "", "tool_calls": [{"id": "call", "type": "function", "function": question.expected}]}
    record: dict[str, Any] = {"task": question.category, "messages": [*question.messages, answer]}
    return record | ({"tools": question.tools} if question.tools else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", action="store_true", help="whole chats for --text instead of prompts")
    parser.add_argument("-n", type=int, default=210, help="questions")
    args = parser.parse_args()
    make = text if args.texts else prompt
    args.out.write_text("".join(json.dumps(make(question)) + "\n" for question in held_out_questions(n=args.n)))


if __name__ == "__main__":
    main()
