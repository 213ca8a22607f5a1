"""Checks of the hashes that the quantizer recorded for its output files."""

from __future__ import annotations

from pathlib import Path

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


def read_record(checkpoint: LoadedCheckpoint, report: Report) -> dict[str, object]:
    """Read our provenance file; empty if it is missing or unreadable."""
    if not (checkpoint.directory / PROVENANCE_NAME).is_file():
        return {}
    try:
        return checkpoint.read_json(PROVENANCE_NAME)
    except CheckpointError as error:
        report.warning("provenance.unreadable", error.message, file=PROVENANCE_NAME, fix=error.tip)
        return {}


def check_hashes(checkpoint: LoadedCheckpoint, record: dict[str, object], report: Report) -> None:
    """Check that every recorded file that exists has the recorded bytes."""
    outputs = record.get("outputs")
    if not isinstance(outputs, dict):
        return  # of an earlier version, or not written by this tool
    changed: dict[str, str] = {}
    same_size = []
    for name, facts in outputs.items():
        path, size = checkpoint.directory / name, facts.get("bytes") if isinstance(facts, dict) else None
        if not path.is_file() or not inside(path, checkpoint.directory):
            continue  # reported elsewhere
        if path.stat().st_size == size:
            same_size.append(name)
        else:
            changed[name] = f"{path.stat().st_size} bytes, {size} were written"
    try:
        for name, hashed in file_facts(checkpoint.directory, same_size).items():
            if hashed["sha256"] != outputs[name].get("sha256"):
                changed[name] = f"not the bytes that were written: sha256 is {hashed['sha256'][:16]}..."
    except OSError as error:  # of a failing disk; it does not always say which file
        where = Path(error.filename).name if error.filename else "a recorded file"
        report.error("shard.damaged", f"cannot be read: {error.strerror}", file=where, fix="copy the checkpoint again")
    changed.pop("README.md", None)  # the model card is there to be edited
    for name, problem in sorted(changed.items()):
        say = report.error if name in _COMPUTED_WITH or name.endswith((".safetensors", ".tiktoken")) else report.warning
        fix = "damaged, or edited since it was quantized: copy it again, or quantize again"
        say("provenance.changed", problem, file=name, fix=fix)
