"""Tokenizer, end tokens and chat template: sound by themselves, and the source's where there is one.

Read as JSON, not with the `tokenizers` library: what a stranger wrote into a normalizer is not run here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.json_file import read_json_object
from glm5_ascend.verify.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.verify.report import Report
from glm5_ascend.verify.stray_files import inside

_TOKENIZER, _GENERATION = "tokenizer.json", "generation_config.json"
_COPY = "copy the tokenizer files of the source"
#: Of tokenizer.json: what decides which ids a text becomes.
_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")


def check_text_files(checkpoint: LoadedCheckpoint, report: Report) -> None:
    """Findings about the files between text and ids; no source needed."""
    if (tokenizer := _read(checkpoint, _TOKENIZER, "files.tokenizer", report)) is not None:
        _check_ids(checkpoint, tokenizer, report)
    generation = _read(checkpoint, _GENERATION, "files.generation_config", report) or {}
    wanted, found = checkpoint.raw.get("eos_token_id"), generation.get("eos_token_id")
    if wanted is not None and found is not None and _listed(wanted) != _listed(found):
        report.error(
            "files.generation_config",
            f"eos_token_id is {found!r:.60}, config.json has {wanted!r:.60}: answers end elsewhere",
            file=_GENERATION,
            fix="copy generation_config.json of the source",
        )
    template = checkpoint.directory / "chat_template.jinja"
    if template.is_file() and inside(template, checkpoint.directory) and not template.stat().st_size:
        report.error("files.chat_template", "empty: chats become nothing", file=template.name, fix=_COPY)


def compare_text_files(checkpoint: LoadedCheckpoint, source: Path, report: Report) -> None:
    """A tokenizer that is sound but another one gives fluent nonsense: it must be the source's."""
    try:
        theirs, ours = read_json_object(source / _TOKENIZER), checkpoint.read_json(_TOKENIZER)
    except CheckpointError:
        return  # ours is reported by the check without a source; a source without one has nothing to compare
    changed = [part for part in _PARTS if theirs.get(part) != ours.get(part)]
    if changed:
        report.error(
            "against.tokenizer", f"differs from the source's in {', '.join(changed)}", file=_TOKENIZER, fix=_COPY
        )


def _read(checkpoint: LoadedCheckpoint, name: str, kind: str, report: Report) -> dict[str, Any] | None:
    if not (checkpoint.directory / name).exists() or not inside(checkpoint.directory / name, checkpoint.directory):
        return None  # reported by check_tree where it matters
    try:
        return checkpoint.read_json(name)
    except CheckpointError as error:
        report.error(kind, error.message, file=name, fix=_COPY)
        return None


def _check_ids(checkpoint: LoadedCheckpoint, tokenizer: dict[str, Any], report: Report) -> None:
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not vocabulary:
        report.error("files.tokenizer", "has no vocabulary", file=_TOKENIZER, fix=_COPY)
        return
    if not isinstance(vocabulary, dict):
        return  # Unigram lists its tokens without ids
    ids = [*vocabulary.values(), *(token.get("id") for token in added or () if isinstance(token, dict))]
    size = checkpoint.config.vocab_size
    wrong = [id for id in ids if not isinstance(id, int) or not 0 <= id < size]
    if wrong or len(set(vocabulary.values())) < len(vocabulary):
        problem = f"id {wrong[0]!r:.40} is none of {size}" if wrong else "two tokens have one id"
        report.error("files.tokenizer", problem, file=_TOKENIZER, fix=_COPY)
        return
    missing = sorted(_listed(checkpoint.raw.get("eos_token_id")) - {repr(id) for id in ids})
    if missing:
        report.error("files.tokenizer", f"has no token for eos_token_id {missing[0]:.40}", file=_TOKENIZER, fix=_COPY)


def _listed(value: object) -> set[str]:
    """An id or a list of ids as a set; none is empty."""
    return {repr(item) for item in (value if isinstance(value, list) else [value]) if item is not None}
