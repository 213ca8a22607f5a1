"""Records of public data sets as chats: messages, ShareGPT, alpaca, prompt and completion."""

from __future__ import annotations

from typing import Any

from glm5_ascend.files.untrusted import parse_json

#: Pairs of keys of one question and its answer.
_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("prompt", "chosen"), ("question", "answer"),
    ("query", "response"), ("problem", "solution"), ("input", "output"),
)  # fmt: skip
_CONVERSATIONS = ("messages", "conversations", "conversation", "chat")
_ROLES = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "glm": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
    "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
#: What a record may be, for a message.
SHAPES = (
    'a string, {"text": ...}, {"messages": [...]}, {"conversations": [...]}, {"instruction": ..., "output": ...}, or '
    '{"prompt": ..., "completion": ...}'
)


def plain_text(record: Any) -> str | None:
    """The text of a record that is one text; None for others."""
    if isinstance(record, str):
        return record
    if isinstance(record, dict) and isinstance(record.get("instruction"), str) and _alpaca(record):
        return None  # alpaca's own `text` has another template
    for key in ("text", "inputs_pretokenized", "content", "raw_content") if isinstance(record, dict) else ():
        if isinstance(record.get(key), str):
            return str(record[key])
    if isinstance(record, dict) and isinstance(record.get("prompt"), str) and chat(record) is None:
        return str(record["prompt"])
    return None


def chat(record: Any) -> list[Any] | None:
    """The messages of a record, in the roles of the OpenAI API; None if it has none.

    Raises:
        ValueError: a role that is not known.
    """
    if not isinstance(record, dict):
        return None
    messages = next((turns for key in _CONVERSATIONS if (turns := _listed(record.get(key))) is not None), None)
    if messages is not None:
        messages = [_message(message) for message in messages]
    elif isinstance(record.get("instruction"), str):
        messages = _alpaca(record)
    else:
        messages = next((pair for keys in _PAIRS if (pair := _pair(record, *keys)) is not None), None)
    system = record.get("system")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if messages and isinstance(system, str) and system and first.get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def tools(record: Any) -> Any:
    """The tools of a record, also where they are JSON in a string; None without."""
    value = record.get("tools") if isinstance(record, dict) else None
    return (_listed(value) or None) if isinstance(value, str) else value


def _listed(value: Any) -> list[Any] | None:
    """A list, or a list in a string of JSON, as a .csv has it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError:
            return None
    return value if isinstance(value, list) else None


def _message(message: Any) -> Any:
    """One message in the roles of the OpenAI API; ShareGPT has `from` and `value`."""
    if not isinstance(message, dict) or "from" not in message:
        return message
    role, value = message["from"], message.get("value")
    standard = _ROLES.get(role.lower()) if isinstance(role, str) else None
    if standard is None:
        raise ValueError(f"unknown role {role!r:.40} in `from`")
    if standard == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(value)}
    return {"role": standard, "content": value}


def _tool_calls(value: Any) -> list[Any]:
    try:
        calls = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"a function_call is not valid JSON: {error}") from None
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def _alpaca(record: dict[str, Any]) -> list[Any] | None:
    answer = next((record[key] for key in ("output", "response") if isinstance(record.get(key), str)), None)
    if answer is None:
        return None
    question = "\n".join(
        text for text in (record["instruction"], record.get("input")) if isinstance(text, str) and text
    )
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _pair(record: dict[str, Any], question: str, answer: str) -> list[Any] | None:
    messages: list[Any] = []
    for role, value in (("user", record.get(question)), ("assistant", record.get(answer))):
        turns = _listed(value)
        if turns is not None and all(isinstance(turn, dict) for turn in turns):
            messages += [_message(turn) for turn in turns]
        elif isinstance(value, str):
            messages.append({"role": role, "content": value})
        else:
            return None
    return messages
