"""The card of a quantized checkpoint: README.md and configuration.json, as Hugging Face and ModelScope show them.

Made of the provenance alone, without a date, so that equal runs give equal bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from glm5_ascend.checkpoint.index import INDEX_NAME
from glm5_ascend.checkpoint.output import PROVENANCE_NAME, file_facts
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME, QUANTIZED
from glm5_ascend.checkpoint.writer import write_json
from glm5_ascend.errors import CheckpointError, OutputError, printable
from glm5_ascend.files.untrusted import read_bytes, read_json_object
from glm5_ascend.files.written import write_file
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.report.units import format_bytes

CARD, CONFIGURATION = "README.md", "configuration.json"
_BEGIN, _END = "<!-- accuracy: written by glm5-ascend eval --card -->", "<!-- end of accuracy -->"
_UNMEASURED = "Not measured: `glm5-ascend eval DIR --against SRC --card` fills in this section."
_MAX_BYTES = 1024**2
#: Deploy profiles by the type of the experts: Atlas 800T A3, Atlas 800T A2.
PROFILES = {
    "W4A8_DYNAMIC": (
        ("Atlas 800T A3, one machine", "a3-single-w4a8"),
        ("Atlas 800T A2, one machine", "a2-single-w4a8"),
    ),
    "W8A8_DYNAMIC": (("Atlas 800T A3, one machine", "a3-single-w8a8"), ("Atlas 800T A3, two machines", "a3-2node")),
}
#: A line of a card's head: key, quote, value.
_LICENSE_LINE = re.compile(
    r"""^(license|license_name|license_link):[ \t]*(["']?)([\w.+:/?=&%#~ -]{1,300}?)\2[ \t]*\r?$""", re.M
)
_OPENING = "every text begins with the markers of the chat template, no sequence inside a chat"
_HASHED = ("config.json", DESCRIPTION_NAME, INDEX_NAME)


def card_files(
    plan: QuantizationPlan, content: Mapping[str, Any], outputs: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Text of README.md and configuration.json by file name, from the provenance and `file_facts` of the others."""
    about = {"framework": "pytorch", "task": "text-generation", "model": {"type": plan.config.model_type}}
    return {CARD: _card(plan, content, outputs), CONFIGURATION: json.dumps(about, indent=2) + "\n"}


def _card(plan: QuantizationPlan, content: Mapping[str, Any], outputs: Mapping[str, Mapping[str, Any]]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    source, recipe = Path(content["source"]["path"]), plan.recipe.metadata.config_id
    base = _base_model(source)
    types = sorted({scheme for _, scheme, _, _ in plan.summary() if scheme in QUANTIZED})
    experts = {linear.scheme for name, linear in plan.linears.items() if plan.config.spec.is_routed(name)}
    head: dict[str, Any] = _license(source)
    head |= {"base_model": base, "base_model_relation": "quantized"} if base else {}
    head |= {
        "pipeline_tag": "text-generation", "frameworks": ["PyTorch"], "tasks": ["text-generation"],
        "tags": [plan.config.model_type, "ascend", "vllm-ascend", "modelslim", _code(recipe), *map(str.lower, types)],
    }  # fmt: skip
    versions, calibration = content["versions"], content["calibration"] or {}
    made_by = [
        ("recipe", "{name}, sha256 {sha256}".format(**content["recipe"])),
        ("source", f"{source.name}, config.json sha256 {content['source']['config_sha256']}"),
        ("calibration", "{tokens} tokens of {file}, sha256 {sha256}".format(**calibration) if calibration else "none"),
        ("opening", _OPENING if calibration.get("opening") else None),
        ("seed", content["seed"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("kernels", content["machine"]["kernels"]), *(("note", note) for note in content["notes"]),
    ]  # fmt: skip
    environment = Environment(
        loader=PackageLoader("glm5_ascend.quantize", "data"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"code": _code, "size": format_bytes}
    return environment.get_template("card.md.j2").render(
        plan=plan, content=content, outputs=outputs,
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        name=(base or source.name).rpartition("/")[2], origin=base or source.name, recipe=recipe,
        accuracy=f"{_BEGIN}\n{_UNMEASURED}\n{_END}", made_by=made_by, record=PROVENANCE_NAME, hashed=_HASHED,
        profiles=next((PROFILES[scheme] for scheme in PROFILES if scheme in experts), ()),
    )  # fmt: skip


def _code(text: str) -> str:
    """Text of strangers inside a table, a heading or backticks."""
    return re.sub(r"[`|<>\[\]]", "", printable(text))


def _base_model(source: Path) -> str | None:
    """The hub's name of the source, where its path is that of a hub's cache: models--ORG--NAME."""
    for folder in reversed(source.absolute().parts):
        if re.fullmatch(r"models--[\w.-]+--[\w.-]+", folder):
            return "/".join(folder.split("--")[1:3])
    return None


def _license(source: Path) -> dict[str, str]:
    """The licence that the head of the source's own card states: `license`, and its name and link if it is "other"."""
    try:
        text = read_bytes(source / CARD, _MAX_BYTES, CheckpointError, "").decode("utf-8", "replace")
    except CheckpointError:
        return {}
    head = re.match(r"(?:\ufeff)?---[ \t]*\r?\n(.*?)\n---", text, re.DOTALL)
    stated = re.findall(_LICENSE_LINE, head[1]) if head else []
    return {key: printable(value) for key, _, value in stated}


def check_card(directory: Path) -> tuple[str, str]:
    """Text of a checkpoint's card before and after its section on accuracy.

    Raises:
        OutputError: the card is missing, or has no such section.
    """
    path = directory / CARD
    text = read_bytes(path, _MAX_BYTES, OutputError, "quantize again, it writes one").decode("utf-8", "surrogateescape")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise OutputError(f"{path}: has no section on accuracy of this tool: left as it is", "add the figures by hand")
    return before, after


def add_accuracy(directory: Path, rows: Iterable[tuple[str, str]], measured: str) -> Path:
    """Replace the section on accuracy of a checkpoint's card, and the card's hash in the record; returns the card.

    Args:
        rows: (figure, value). measured: on what they were measured, one sentence.
    Raises:
        OutputError: as `check_card`; the card is not changed.
    """
    path = directory / CARD
    before, after = check_card(directory)
    table = "\n".join(f"| {_code(name)} | {_code(value)} |" for name, value in rows)
    section = f"{_BEGIN}\n{measured}\n\n| figure | value |\n|---|---|\n{table}\n{_END}"
    recorded = directory / PROVENANCE_NAME
    record = read_json_object(recorded) if recorded.is_file() else {}
    outputs = record.get("outputs")
    ours = isinstance(outputs, dict) and outputs.get(CARD) == file_facts(directory, [CARD])[CARD]
    write_file(path, (before + section + after).encode("utf-8", "surrogateescape"))
    if ours:
        write_json(recorded, record | {"outputs": {**outputs, CARD: file_facts(directory, [CARD])[CARD]}})  # type: ignore[dict-item]
    return path
