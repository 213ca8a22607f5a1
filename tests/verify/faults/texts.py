"""Faults in tokenizer, chat template and generation_config.json, and files that do not belong there."""

from __future__ import annotations

from typing import Any

from tests.verify.faults.row import Linked, Row, content, key, removed, tokenizer, without

TOKENIZER, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
T, S, J, G, F = "tokenizer.json", "tokenizer_config.json", "chat template", "generation_config.json", "stray file"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def swapped(parsed: dict[str, Any]) -> None:
    vocabulary = parsed["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def model(**changes: Any) -> Any:
    return tokenizer(lambda parsed: parsed["model"].update(changes))


def added(index: int, **changes: Any) -> Any:
    return tokenizer(lambda parsed: parsed["added_tokens"][index].update(changes))


def part(name: str, value: Any) -> Any:
    return tokenizer(lambda parsed: parsed.update({name: value}))


def another_template_in_the_settings(ck: Linked) -> None:
    key(SETTINGS, "chat_template", "[gMASK]{{ messages[0].content }}")(ck)


ROWS = [
    Row(T, "missing", removed(TOKENIZER), "cannot be served"),
    Row(T, "empty", content(TOKENIZER, ""), "not valid JSON"),
    Row(T, "empty vocabulary", model(vocab={}), "has no vocabulary"),
    Row(T, "unknown model", model(type="Megatoken"), "model type 'Megatoken'"),
    Row(T, "id too large", model(vocab={"a": 10**6}), "is none of"),
    Row(T, "two tokens, one id", model(vocab={"a": 1, "b": 1}), "two tokens have one id"),
    Row(
        T, "two tokens swapped", tokenizer(swapped),
        "differs from the source's in model|not the bytes|bytes, ", modes="hs",
    ),
    Row(T, "another merge", model(merges=[["a", "b"]]), "source's in model|were written", modes="hs"),
    Row(T, "no byte level", part("pre_tokenizer", None), "nothing turns text into them"),
    Row(T, "no decoder", part("decoder", None), "nothing turns them back"),
    Row(T, "added token without text", added(0, content=""), "no text"),
    Row(T, "added token with two ids", added(1, id=2), "as an added token"),
    Row(
        T, "end token gone", tokenizer(lambda t: [t["added_tokens"].pop(0), t["model"]["vocab"].pop("<|endoftext|>")]),
        "no token for eos_token_id",
    ),
    Row(
        T, "another normalizer", part("normalizer", {"type": "Lowercase"}),
        "source's in normalizer|were written", modes="hs",
    ),
    Row(S, "missing", removed(SETTINGS), "neither the class"),
    Row(S, "auto_map", key(SETTINGS, "auto_map", {"AutoTokenizer": ["x.Y", None]}), "auto_map names code"),
    Row(S, "tokenizer_class", key(SETTINGS, "tokenizer_class", 7), "tokenizer_class is 7"),
    Row(
        S, "another tokenizer_class", key(SETTINGS, "tokenizer_class", "LlamaTokenizer"),
        "source's in tokenizer_class", modes="s",
    ),
    Row(S, "unknown eos_token", key(SETTINGS, "eos_token", "</s>"), "behind the last embedding"),
    Row(S, "another eos_token", key(SETTINGS, "eos_token", "<|user|>"), "config.json ends answers at 0"),
    Row(
        S, "added_tokens_decoder", key(SETTINGS, "added_tokens_decoder", {"3": {"content": "[gMASK]"}}), "gives id '3'",
    ),
    Row(S, "special_tokens_map.json", content("special_tokens_map.json", "{"), "not valid JSON"),
    Row(J, "empty", content(TEMPLATE, ""), "chats become nothing"),
    Row(J, "no jinja", content(TEMPLATE, "{% for m in messages %}{{ m"), "not valid jinja"),
    Row(J, "too deep", content(TEMPLATE, "{{" + "(" * 50_000), "nested too deeply"),
    Row(J, "too long", content(TEMPLATE, "x" * 300_000), "larger than 256 KiB"),
    Row(J, "not UTF-8", content(TEMPLATE, b"\xff\xfe"), "not UTF-8"),
    Row(J, "of another model", content(TEMPLATE, CHATML), "written for another model"),
    Row(J, "half of another model", content(TEMPLATE, "<|user|>" + CHATML), "cut into pieces", "warning"),
    Row(J, "another text", content(TEMPLATE, "{{ messages }}"), "differs from the source's", modes="s"),
    Row(J, "missing", removed(TEMPLATE), "no chat template", "warning"),
    Row(J, "missing, the source has one", removed(TEMPLATE), "in one of the two only", modes="s"),
    Row(J, "two", another_template_in_the_settings, "differs from the one in tokenizer_config", "warning"),
    Row(J, "broken in the settings", key(SETTINGS, "chat_template", "{{"), "chat template: not valid jinja"),
    Row(J, "several", key(SETTINGS, "chat_template", [{"name": "rag", "template": "{%"}]), "no text"),
    Row(G, "no JSON", content(GENERATION, "nothing"), "not valid JSON"),
    Row(G, "another end token", key(GENERATION, "eos_token_id", [1]), "answers end elsewhere"),
    Row(G, "an end token that is none", key(GENERATION, "eos_token_id", 10**6), "the vocabulary has"),
    Row(G, "pad_token_id", key(GENERATION, "pad_token_id", 999), "pad_token_id is 999"),
    Row(
        G, "no end token anywhere",
        lambda ck: [without(GENERATION, "eos_token_id")(ck), without("config.json", "eos_token_id")(ck)],
        "no answer ends",
    ),
    Row(G, "temperature", key(GENERATION, "temperature", "hot"), "temperature is 'hot'"),
    Row(
        G, "sampling of somebody's own", key(GENERATION, "temperature", 0.6),
        "source's in temperature", "warning", modes="s",
    ),
    Row(F, "Python", content("modeling_x.py", "print(1)"), "Python code"),
    Row(F, "pickle", content("pytorch_model.bin", "x"), "pickle files"),
    Row(
        F, "stale shard", lambda ck: ck.write("old.safetensors", (ck.directory / ck.shards[0]).read_bytes()),
        "not in the index",
    ),
    Row(F, "hf_quant_config.json", content("hf_quant_config.json", "{}"), "never open the description"),
    Row(F, "gguf", content("model.gguf", "GGUF"), "weights of another format", "warning"),
    Row(F, "adapter", content("adapter_config.json", "{}"), "load an adapter", "warning"),
    Row(F, "shards below", lambda ck: ck.write("original/a.safetensors", b"x"), "stray copy", "warning"),
]  # fmt: skip
