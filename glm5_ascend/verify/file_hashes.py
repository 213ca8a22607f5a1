"""Checks of the hashes that the quantizer recorded for its output files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint, inside
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.index import INDEX_NAME
from glm5_ascend.checkpoint.output import PROVENANCE_NAME, file_facts
from glm5_ascend.checkpoint.schemes import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError

#: Files that the engine computes with, and those that decide which ids a text becomes. Others (chat template,
#: generation_config.json, tokenizer_config.json) people edit on purpose.
_COMPUTED_WITH = (
    INDEX_NAME, DESCRIPTION_NAME, "config.json",
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def read_record(checkpoint: LoadedCheckpoint, report: Report) -> dict[str, Any]:
    """Read our provenance file; empty if it is missing or unreadable."""
    if not (checkpoint.directory / PROVENANCE_NAME).is_file():
        return {}
    try:
        return checkpoint.read_json(PROVENANCE_NAME)
    except CheckpointError as error:
        report.warning("provenance.unreadable", error.message, file=PROVENANCE_NAME, fix=error.tip)
        return {}


def recorded_files(checkpoint: LoadedCheckpoint, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return size and sha256 of every recorded file that exists; empty without a record of this tool."""
    outputs = record.get("outputs")
    return {
        name: facts if isinstance(facts, dict) else {}
        for name, facts in (outputs if isinstance(outputs, dict) else {}).items()
        if (path := checkpoint.directory / name).is_file() and inside(path, checkpoint.directory)
    }  # others are reported elsewhere


def check_hashes(
    checkpoint: LoadedCheckpoint,
    recorded: dict[str, dict[str, Any]],
    hashes: Mapping[str, str],
    report: Report,
) -> None:
    """Check that every recorded file has the recorded bytes.

    Args:
        hashes: file -> sha256, of those that were read already.
    """
    changed: dict[str, str] = {}
    same_size = []
    for name, facts in recorded.items():
        written = (checkpoint.directory / name).stat().st_size
        if written == facts.get("bytes"):
            same_size.append(name)
        else:
            changed[name] = f"{written} bytes, {facts.get('bytes')} were written"
    try:
        unread = [name for name in same_size if name not in hashes]
        facts_read = file_facts(checkpoint.directory, unread)
        sha256 = {name: facts_read[name]["sha256"] for name in unread} | dict(hashes)
        for name in same_size:
            if sha256[name] != recorded[name].get("sha256"):
                changed[name] = f"not the bytes that were written: sha256 is {sha256[name][:16]}..."
    except OSError as error:  # of a failing disk; it does not always say which file
        where = Path(error.filename).name if error.filename else "a recorded file"
        report.error("shard.damaged", f"cannot be read: {error.strerror}", file=where, fix="copy the checkpoint again")
    changed.pop("README.md", None)  # the model card is there to be edited
    for name, problem in sorted(changed.items()):
        say = report.error if name in _COMPUTED_WITH or name.endswith((".safetensors", ".tiktoken")) else report.warning
        fix = "damaged, or edited since it was quantized: copy it again, or quantize again"
        say("provenance.changed", problem, file=name, fix=fix)
