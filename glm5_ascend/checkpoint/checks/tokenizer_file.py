"""Checks of tokenizer.json and tokenizer_config.json: each valid, and consistent with each other and config.json.

Read as JSON, not with the `tokenizers` library, so that a normalizer written by others is not run here. Each check
states what that library and transformers do with the defect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
COPY = "copy the tokenizer files of the source"
#: Of tokenizer.json: what decides which ids a text becomes.
PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
#: Keys of tokenizer_config.json that name a token.
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
#: A space as the first character of a word in byte-level vocabularies.
_BYTE_LEVEL_SPACE = "\u0120"


def check_ids(checkpoint: LoadedCheckpoint, tokenizer: dict[str, Any], report: Report) -> dict[str, int] | None:
    """Findings about tokenizer.json; returns every token's id, None where it cannot be relied on."""
    problem, ids = _ids(tokenizer, checkpoint.config.vocab_size)
    if problem is None and ids is not None:
        missing = sorted(listed(checkpoint.raw.get("eos_token_id")) - {repr(id) for id in ids.values()})
        problem = f"has no token for eos_token_id {missing[0]:.40}" if missing else None
    if problem:
        report.error("files.tokenizer", problem, file=TOKENIZER, fix=COPY)
        return None
    return ids


def _ids(tokenizer: dict[str, Any], size: int) -> tuple[str | None, dict[str, int] | None]:
    """Return (problem or None, id of every token if listed) of the tokenizer for a vocabulary of `size`."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not vocabulary:
        return "has no vocabulary", None
    if model.get("type") not in (None, *_MODELS):
        return f"model type {model['type']!r:.40} is none of {', '.join(_MODELS)}", None
    if not isinstance(vocabulary, dict):
        return None, None  # Unigram lists its tokens without ids
    problem, added = _added(tokenizer, vocabulary)
    ids = [*vocabulary.values(), *added.values()]
    wrong = [id for id in ids if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < size]
    if wrong:
        problem = f"id {wrong[0]!r:.40} is none of {size}"
    elif len(set(vocabulary.values())) < len(vocabulary):
        problem = "two tokens have one id"
    if problem is None:
        problem = _byte_level(tokenizer, vocabulary)
    return problem, None if problem else vocabulary | added


def _added(tokenizer: dict[str, Any], vocabulary: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return (problem or None, ids) of the added tokens; for two ids the library takes the vocabulary's."""
    entries: Any = tokenizer.get("added_tokens") or []
    added: dict[str, Any] = {}
    if not isinstance(entries, list) or not all(isinstance(token, dict) for token in entries):
        return "added_tokens is no list of objects", {}
    for token in entries:
        content, id = token.get("content"), token.get("id")
        if not isinstance(content, str) or not content:
            return f"an added token is {content!r:.40}, no text", added
        if vocabulary.get(content, id) != id:
            return f"{content!r:.40} has id {id!r:.40} as an added token, {vocabulary[content]!r:.40} elsewhere", added
        added[content] = id
    if len({repr(id) for id in added.values()}) < len(added):
        return "two added tokens have one id", added
    return None, added


def _byte_level(tokenizer: dict[str, Any], vocabulary: dict[str, Any]) -> str | None:
    """A vocabulary written in byte characters needs the step that writes text so, and the one that reads it back."""
    if _BYTE_LEVEL_SPACE not in vocabulary:
        return None
    before = json.dumps([tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")])
    if "ByteLevel" not in before:
        return "the vocabulary is of byte characters, but nothing turns text into them (pre_tokenizer)"
    if "ByteLevel" not in json.dumps(tokenizer.get("decoder")):
        return "the vocabulary is of byte characters, but nothing turns them back into text (decoder)"
    return None


def check_settings(
    checkpoint: LoadedCheckpoint, settings: dict[str, Any], ids: dict[str, int] | None, report: Report
) -> None:
    """Findings about tokenizer_config.json; `ids` are those of tokenizer.json, None if that is broken."""
    if problem := next(_setting_problems(checkpoint, settings, ids), None):
        report.error("files.tokenizer_config", problem, file=SETTINGS, fix=COPY)


def _setting_problems(
    checkpoint: LoadedCheckpoint, settings: dict[str, Any], ids: dict[str, int] | None
) -> Iterator[str]:
    tokenizer_class = settings.get("tokenizer_class")
    if tokenizer_class is not None and not isinstance(tokenizer_class, str):
        yield f"tokenizer_class is {tokenizer_class!r:.40}, no name"
    if settings.get("auto_map"):
        yield "auto_map names code of the checkpoint: with trust_remote_code an engine runs it, or stops without it"
    if ids is None:
        return
    for key in _NAMED:
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and token not in ids if isinstance(token, str) else token is not None:
            yield f"{key} {token!r:.40} is not in {TOKENIZER}: transformers would add it behind the last embedding"
        ends = listed(checkpoint.raw.get("eos_token_id"))
        if key == "eos_token" and isinstance(token, str) and ends and repr(ids[token]) not in ends:
            yield f"eos_token {token!r:.40} has id {ids[token]}, config.json ends answers at {', '.join(sorted(ends))}"
    decoder = settings.get("added_tokens_decoder")
    if decoder is not None and not isinstance(decoder, dict):
        yield f"added_tokens_decoder is {decoder!r:.40}, no object"
    for id, token in decoder.items() if isinstance(decoder, dict) else ():
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) or repr(ids.get(content)) != id:
            yield f"added_tokens_decoder gives id {id!r:.40} to {content!r:.40}, {TOKENIZER} does not"


def listed(value: object) -> set[str]:
    """An id or a list of ids as a set; none is empty."""
    return {repr(item) for item in (value if isinstance(value, list) else [value]) if item is not None}
