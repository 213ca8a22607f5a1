"""Byte-level BPE with GLM's special tokens; digits stand alone and a capitalised word never carries its space."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from glm5_ascend.demo_model.resources import data_folder

VOCAB_SIZE = 1024
END_OF_TEXT = "<|endoftext|>"
STOP_TOKENS = (END_OF_TEXT, "<|user|>", "<|observation|>")
CONTROL_TOKENS = (
    END_OF_TEXT, "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
# Marks the parsers look for in the text: added tokens, but not "special", so that detokenizing keeps them.
MARK_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
)  # fmt: skip
# A name must be the same tokens after a space, a quote and a tag, or copying it means translating it: the space
# before a capital is a token of its own, the one before a lower-case word belongs to the word.
WORDS = r"\d| ?[a-z]+|[A-Z][a-z]*|[^\S\n]+(?= [a-z])|[^\S\n]+|\n+| ?[^\sA-Za-z\d]+"


def chat_template() -> str:
    """The text of our chat template."""
    return (data_folder() / "chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Learn the merges from `texts` and return a `PreTrainedTokenizerFast` of exactly `VOCAB_SIZE` tokens."""
    specials = len(CONTROL_TOKENS) + len(MARK_TOKENS)
    core = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_special_tokens(list(CONTROL_TOKENS))
    core.add_tokens(list(MARK_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )
    tokenizer.chat_template = chat_template()
    return tokenizer
