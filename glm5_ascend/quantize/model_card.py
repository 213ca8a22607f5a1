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
_HASHED = ("config.json", DESCRIPTION_NAME, INDEX_NAME)


def card_files(
    plan: QuantizationPlan, content: Mapping[str, Any], outputs: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Text of README.md and configuration.json by file name.

    Args:
        content: the provenance; `quantizer` names another program that quantized.
        outputs: size and sha256 of the checkpoint's other files.
    """
    configuration = {
        "framework": "pytorch", "task": "text-generation", "model": {"type": plan.config.model_type},
    }  # fmt: skip
    return {
        CARD: _card(plan, content, outputs),
        CONFIGURATION: json.dumps(configuration, indent=2) + "\n",
    }


def _card(plan: QuantizationPlan, content: Mapping[str, Any], outputs: Mapping[str, Mapping[str, Any]]) -> str:
    source, recipe = Path(content["source"]["path"]), plan.recipe.metadata.config_id
    base, license = _base_model(source), _license(source)
    types = sorted({scheme for _, scheme, _, _ in plan.summary() if scheme in QUANTIZED})
    head: dict[str, Any] = {"license": license} if license else {}
    head |= {"base_model": base, "base_model_relation": "quantized"} if base else {}
    head |= {
        "pipeline_tag": "text-generation", "frameworks": ["PyTorch"], "tasks": ["text-generation"],
        "tags": [plan.config.model_type, "ascend", "vllm-ascend", "modelslim", _code(recipe), *map(str.lower, types)],
    }  # fmt: skip
    author = f"Quantized by {content['quantizer']}, started by" if "quantizer" in content else "Written by"
    name = _code((base or source.name).rpartition("/")[2]) or "GLM-5"
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n",
        f"# {name}, quantized for Ascend by `{_code(recipe)}`\n",
        f"`{_code(base or source.name)}` in the format of msModelSlim, which vllm-ascend and SGLang load. {author} "
        f"glm5-ascend {content['tool']['version']}.\n",
        *_contents(plan, sizes="quantizer" not in content),
        "## Accuracy\n",
        f"{_BEGIN}\n{_UNMEASURED}\n{_END}\n",
        "## Serve\n",
        *_serve(plan),
        "## Made by\n",
        *_made_by(content),
        "\n## Files\n",
        f"`{PROVENANCE_NAME}` has the sha256 of every file; `glm5-ascend verify DIR` compares them.\n",
        "| file | sha256 |\n|---|---|",
        *(f"| `{file}` | `{outputs[file]['sha256']}` |" for file in _HASHED if file in outputs),
    ]
    return "\n".join(lines) + "\n"


def _contents(plan: QuantizationPlan, *, sizes: bool) -> Iterable[str]:
    """Number and type of the modules; sizes of our own layout only, msModelSlim stores some FLOAT tensors wider."""
    yield "| modules | type | weights |" + " size |" * sizes + "\n|---|---|---|" + "---|" * sizes
    for modules, scheme, count, size in plan.summary():
        yield f"| {modules} | {scheme} | {count} |" + f" {format_bytes(size)} |" * sizes
    yield f"\nTensors: {format_bytes(plan.output_bytes)}.\n" if sizes else ""


def _serve(plan: QuantizationPlan) -> Iterable[str]:
    experts = {linear.scheme for name, linear in plan.linears.items() if plan.config.spec.is_routed(name)}
    profiles = next((PROFILES[scheme] for scheme in PROFILES if scheme in experts), ())
    yield "```bash\npip install --no-deps glm5_ascend-*.whl  # in vllm-ascend's image; keeps its versions"
    for machine, profile in profiles:
        yield f"glm5-ascend serve DIR --profile {profile}  # {machine}"
    yield "glm5-ascend doctor DIR --profile NAME  # versions, devices, known bad combinations\n```\n"
    yield (
        "Without this tool: `vllm serve DIR --quantization ascend` with vllm-ascend, `--quantization modelslim` with "
        "SGLang. No NPU has run this tool's own code yet; its README says what was tested.\n"
    )


def _made_by(content: Mapping[str, Any]) -> Iterable[str]:
    versions, calibration = content.get("versions", {}), content["calibration"]
    yield "| what | value |\n|---|---|"
    rows = {
        "recipe": f"{content['recipe']['name']}, sha256 {content['recipe']['sha256']}",
        "source": f"{Path(content['source']['path']).name}, config.json sha256 {content['source']['config_sha256']}",
        "calibration": "none"
        if calibration is None
        else f"{calibration['tokens']} tokens of {calibration['file']}, sha256 {calibration['sha256']}",
        "seed": content.get("seed"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version) or None,
        "kernels": content["machine"].get("kernels"),
    }
    yield from (f"| {name} | {_code(str(value))} |" for name, value in rows.items() if value is not None)
    yield from (f"| note | {_code(note)} |" for note in content["notes"])


def _code(text: str) -> str:
    """Text of strangers inside a table, a heading or backticks."""
    return re.sub(r"[`|<>\[\]]", "", printable(text))


def _base_model(source: Path) -> str | None:
    """The hub's name of the source, where its path is that of a hub's cache: models--ORG--NAME."""
    for folder in reversed(source.absolute().parts):
        if re.fullmatch(r"models--[\w.-]+--[\w.-]+", folder):
            return "/".join(folder.split("--")[1:3])
    return None


def _license(source: Path) -> str | None:
    try:
        text = read_bytes(source / CARD, _MAX_BYTES, CheckpointError, "").decode("utf-8", "replace")
    except CheckpointError:
        return None
    head = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    stated = re.search(r"^license:\s*([\w.+-]{1,60})\s*$", head[1], re.MULTILINE) if head else None
    return stated[1] if stated else None


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
