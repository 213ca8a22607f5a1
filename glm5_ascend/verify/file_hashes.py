"""What the quantizer recorded of its own output: the hash of every file, taken when the last byte was written."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, inside
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.index import INDEX_NAME
from glm5_ascend.checkpoint.output import PROVENANCE_NAME, file_facts
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError

#: Files of the format. Others (chat template, generation_config.json, tokenizer_config.json) people edit on purpose.
_FORMAT = (INDEX_NAME, DESCRIPTION_NAME, "config.json")
#: What decides which ids a text becomes: nobody edits these.
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


def read_record(checkpoint: LoadedCheckpoint, report: Report) -> dict[str, object]:
    """Content of our provenance file; empty if there is none, or none that can be read."""
    if not (checkpoint.directory / PROVENANCE_NAME).is_file():
        return {}
    try:
        return checkpoint.read_json(PROVENANCE_NAME)
    except CheckpointError as error:
        report.warning("provenance.unreadable", error.message, file=PROVENANCE_NAME, fix=error.tip)
        return {}


def is_format_file(name: str) -> bool:
    """Whether the engine computes with this file: a change of it is an error, of others a warning."""
    return name.endswith(".safetensors") or name in _FORMAT


def is_tokenizer_file(name: str) -> bool:
    """Whether another content gives other ids of the same text."""
    return name in _TOKENIZER or name.endswith(".tiktoken")


def check_hashes(checkpoint: LoadedCheckpoint, record: dict[str, object], report: Report) -> None:
    """Every recorded file that is still there holds the bytes that were written."""
    outputs = record.get("outputs")
    if not isinstance(outputs, dict):
        return  # of an earlier version, or not written by this tool
    changed: dict[str, str] = {}
    same_size = []
    for name, facts in outputs.items():
        path, wanted = checkpoint.directory / name, facts.get("bytes") if isinstance(facts, dict) else None
        if not path.is_file() or not inside(path, checkpoint.directory):
            continue  # reported where it is missed
        if path.stat().st_size == wanted:
            same_size.append(name)
        else:
            changed[name] = f"{path.stat().st_size} bytes, {wanted} were written"
    try:
        for name, found in file_facts(checkpoint.directory, same_size).items():
            if found["sha256"] != outputs[name].get("sha256"):
                changed[name] = f"not the bytes that were written: sha256 is {found['sha256'][:16]}..."
    except OSError as error:  # of a failing disk; it does not always say which file
        where = Path(error.filename).name if error.filename else "a recorded file"
        report.error("shard.damaged", f"cannot be read: {error.strerror}", file=where, fix="copy the checkpoint again")
    for name, problem in sorted(changed.items()):
        say = report.error if is_format_file(name) or is_tokenizer_file(name) else report.warning
        fix = "damaged, or edited since it was quantized: copy it again, or quantize again"
        say("provenance.changed", problem, file=name, fix=fix)
