"""Tokenizer, end tokens and chat template: there, sound by themselves, and the source's where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.checks.chat_template import TEMPLATE, check_template
from glm5_ascend.checkpoint.checks.config_keys import bad_ids
from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, inside
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.checks.tokenizer_file import (
    COPY,
    PARTS,
    SETTINGS,
    TOKENIZER,
    check_ids,
    check_settings,
    listed,
)
from glm5_ascend.checkpoint.output import sha256
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import read_json_object

_GENERATION = "generation_config.json"
#: JSON beside tokenizer.json that transformers or older readers take into account.
_TOKENS = ("special_tokens_map.json", "added_tokens.json", "vocab.json")
#: Keys that libraries write anew when they save a tokenizer.
_FREE_KEYS = {"_commit_hash", "name_or_path", "transformers_version", "is_local", "local_files_only", "backend"}
#: Files that are compared byte by byte, by the end of their names.
_BYTES = (".tiktoken", "tokenizer.model", "merges.txt", "vocab.txt", TEMPLATE)
#: Defaults of a request's sampling that vLLM takes from generation_config.json: (lowest, highest).
_SAMPLING = {"temperature": (0, math.inf), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0, math.inf)}


def check_text_files(checkpoint: LoadedCheckpoint, report: Report) -> None:
    """Findings about the files between text and ids; no source needed."""
    _check_there(checkpoint.directory, report)
    tokenizer = _read(checkpoint, TOKENIZER, "files.tokenizer", report)
    settings = _read(checkpoint, SETTINGS, "files.tokenizer_config", report) or {}
    ids = None if tokenizer is None else check_ids(checkpoint, tokenizer, report)
    check_settings(checkpoint, settings, ids, report)
    for name in _TOKENS:
        _read(checkpoint, name, "files.tokenizer", report)
    check_template(checkpoint, settings, ids, report)
    _check_processor(checkpoint, report)
    generation = _read(checkpoint, _GENERATION, "files.generation_config", report) or {}
    for problem in _generation_problems(checkpoint, generation):
        report.error("files.generation_config", problem, file=_GENERATION, fix="copy the source's")


def _check_there(directory: Path, report: Report) -> None:
    """Without them no engine starts, or it chooses another class of tokenizer."""
    if not any((directory / name).is_file() for name in (TOKENIZER, "tokenizer.model")) and not any(
        directory.glob("*.tiktoken")
    ):
        why = f"no {TOKENIZER}, tokenizer.model or *.tiktoken: the checkpoint cannot be served"
        report.error("files.tokenizer", why, file=TOKENIZER, fix=COPY)
    elif not (directory / SETTINGS).is_file():
        why = "not found: the server knows neither the class of the tokenizer nor its special tokens"
        report.error("files.tokenizer", why, file=SETTINGS, fix=COPY)


def _check_processor(checkpoint: LoadedCheckpoint, report: Report) -> None:
    files = checkpoint.config.spec.processor_files
    for name in files:
        _read(checkpoint, name, "files.processor", report)
    if files and not any((checkpoint.directory / name).is_file() for name in files):
        report.warning(
            "files.processor",
            f"neither {' nor '.join(files)}: no engine can read images",
            file=files[0],
            fix="copy the source's",
        )


def _read(checkpoint: LoadedCheckpoint, name: str, finding_id: str, report: Report) -> dict[str, Any] | None:
    if not (checkpoint.directory / name).exists() or not inside(checkpoint.directory / name, checkpoint.directory):
        return None  # reported where it matters
    try:
        return checkpoint.read_json(name)
    except CheckpointError as error:
        report.error(finding_id, error.message, file=name, fix=COPY)
        return None


def _generation_problems(checkpoint: LoadedCheckpoint, generation: dict[str, Any]) -> Iterator[str]:
    """vLLM ends answers at the tokens of this file and of config.json, and samples by this file's numbers."""
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        problem = bad_ids(generation.get(key), checkpoint.config.vocab_size, several=key == "eos_token_id")
        if problem:
            yield f"{key} {problem}"
    config_eos, eos = checkpoint.raw.get("eos_token_id"), generation.get("eos_token_id")
    if config_eos is not None and eos is not None and listed(config_eos) != listed(eos):
        yield f"eos_token_id is {eos!r:.60}, config.json has {config_eos!r:.60}: answers end elsewhere"
    if config_eos is None and eos is None:
        yield "eos_token_id is neither here nor in config.json: no answer ends"
    for key, (low, high) in _SAMPLING.items():
        value = generation.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and low <= value <= high and math.isfinite(value)):
            yield f"{key} is {value!r:.40}: the engine refuses every request that does not give its own"


def compare_text_files(checkpoint: LoadedCheckpoint, source: Path, report: Report) -> None:
    """A tokenizer that is sound but another one gives fluent nonsense: it must be the source's."""
    for name in (TOKENIZER, SETTINGS, *_TOKENS, _GENERATION, *checkpoint.config.spec.processor_files):
        _compare_json(checkpoint, source, name, report)
    paths = (*source.iterdir(), *checkpoint.directory.iterdir())
    for name in sorted({path.name for path in paths if path.name.endswith(_BYTES)}):
        theirs, ours = source / name, checkpoint.directory / name
        if not inside(ours, checkpoint.directory) or (name == TEMPLATE and not theirs.is_file()):
            continue  # reported, and not opened; a template of one's own is none to compare
        if theirs.is_file() != ours.is_file() or (theirs.is_file() and sha256(theirs) != sha256(ours)):
            finding_id = "against.chat_template" if name == TEMPLATE else "against.tokenizer"
            report.error(finding_id, "differs from the source's, or is in one of the two only", file=name, fix=COPY)


def _compare_json(checkpoint: LoadedCheckpoint, source: Path, name: str, report: Report) -> None:
    """Error where ids or end tokens differ; what a library writes of its own is free."""
    if not (source / name).is_file():
        return  # a source without one has nothing to compare
    finding_id = "against.generation_config" if name == _GENERATION else "against.tokenizer"
    if name in checkpoint.config.spec.processor_files:
        finding_id = "against.processor"
    if not (checkpoint.directory / name).exists():
        if name not in (TOKENIZER, SETTINGS):  # reported by the check without a source
            report.error(finding_id, "not found; the source has one", file=name, fix=COPY)
        return
    try:
        theirs, ours = read_json_object(source / name), checkpoint.read_json(name)
    except CheckpointError:
        return  # ours is reported by the check without a source
    keys = PARTS if name == TOKENIZER else sorted((theirs.keys() | ours.keys()) - _FREE_KEYS)
    changed = [key for key in keys if theirs.get(key) != ours.get(key)]
    if changed:
        free = name == _GENERATION and "eos_token_id" not in changed  # sampling defaults are set on purpose
        say = report.warning if free else report.error
        say(finding_id, f"differs from the source's in {', '.join(changed[:8])}", file=name, fix=COPY)
