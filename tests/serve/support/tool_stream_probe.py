"""A forced tool call through vLLM's parser classes, streamed and whole.  python tool_stream_probe.py TOKENIZER WHOSE

WHOSE is `stock` or `plugin`. No model: the text is one that the request's grammar allows, cut into its special tokens
("special") or into letters ("letters"), fed in deltas of 1, 3 and all tokens as the server feeds them. Prints a line
of JSON: what came out, and the tokens the grammar allows first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xgrammar
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CHOICES: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "function": {"name": "get_weather"}},
    "auto": "auto",
}
OFF = {"enable_thinking": False}


def start(tokenizer: Any, choice: str) -> tuple[Any, Any]:
    """A parser and its request, as the chat endpoint makes them."""
    kind = ParserManager.get_parser(
        tool_parser_name="glm47", reasoning_parser_name="glm45", enable_auto_tools=True, tokenizer=tokenizer
    )
    request = ChatCompletionRequest(
        model="glm-5", messages=[{"role": "user", "content": "?"}], tools=[TOOL], tool_choice=CHOICES[choice],
        stream=True, chat_template_kwargs=OFF,
    )  # fmt: skip
    parser = kind(tokenizer, request.tools, chat_template_kwargs=OFF)
    return parser, parser.adjust_request(request)


def streamed(tokenizer: Any, choice: str, ids: list[int], size: int) -> dict[str, Any]:
    parser, request = start(tokenizer, choice)
    prompt = tokenizer("<|user|>?<|assistant|></think>", add_special_tokens=False)["input_ids"]
    decoder = DecodeStream(skip_special_tokens=request.skip_special_tokens)
    content, calls = "", [["", ""]]
    for first in range(0, len(ids), size):
        few = ids[first : first + size]
        text = "".join(decoder.step(tokenizer._tokenizer, token) or "" for token in few)
        last = first + size >= len(ids)
        delta = parser.parse_delta(text, few, request, prompt_token_ids=prompt, finished=last)
        content += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or []:
            while call.index >= len(calls):
                calls.append(["", ""])
            calls[call.index][0] += call.function.name or ""
            calls[call.index][1] += call.function.arguments or ""
    return {"content": content, "calls": [call for call in calls if call[0]]}


def whole(tokenizer: Any, choice: str) -> dict[str, Any]:
    parser, request = start(tokenizer, choice)
    _, content, calls = parser.parse(CALL, request, enable_auto_tools=True)
    return {"content": content or "", "calls": [[call.name, call.arguments] for call in calls or []]}


def allowed_first(tokenizer: Any, choice: str) -> list[str]:
    """Tokens with which the grammar that vLLM makes of the request lets an answer begin."""
    _, request = start(tokenizer, choice)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(request.structured_outputs.structural_tag)
    mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))
    xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(mask)
    bits = [int(word) & 0xFFFFFFFF for word in mask[0]]
    return [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer)) if bits[i // 32] >> i % 32 & 1]


def main() -> None:
    folder, whose = sys.argv[1:3]
    if whose == "plugin":
        from glm5_ascend.serve.plugin import tools

        tools.register()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    cut = {"special": ids(CALL), "letters": [token for letter in CALL for token in ids(letter)]}
    report: dict[str, Any] = {"allowed first": allowed_first(tokenizer, "required")}
    for choice in CHOICES:
        report[f"{choice} whole"] = whole(tokenizer, choice)
        for name, tokens in cut.items():
            for size in (1, 3, len(tokens)):
                key = f"{choice} {name} {size if size < len(tokens) else 'all'}"
                report[key] = streamed(tokenizer, choice, tokens, size)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
