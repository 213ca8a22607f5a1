"""What a checkpoint directory holds, as far as a choice of profile depends on it. Reads two JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.types import DESCRIPTION_NAME, FLOAT
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import flat_keys, parse_config, read_config

MIXED = "mixed types"


@dataclass(frozen=True)
class CheckpointSummary:
    """experts, attention: type of the routed experts and of q_a, kv_a and q_b (MTP layer left out).

    raw: content of config.json; config: its keys of the language model; model: their checked values;
    types: of every tensor, empty if not quantized; group_size: of the description, None if it is absent.
    """

    directory: Path
    experts: str
    attention: str
    raw: dict[str, Any]
    config: dict[str, Any]
    model: ModelConfig
    types: dict[str, str]
    group_size: int | None


def summarize(directory: Path) -> CheckpointSummary:
    """Read config.json and, if there is one, the description.

    Raises:
        CheckpointError: the description is damaged. ConfigError: config.json is missing, or has an impossible value.
    """
    raw = read_config(directory)
    model, config = parse_config(raw, directory / "config.json"), flat_keys(raw)
    content: dict[str, Any] = {}
    path = directory / DESCRIPTION_NAME
    if path.exists():
        content = read_json_object(path, max_bytes=MAX_BYTES_BY_TENSOR)
    types = {key: scheme for key, scheme in content.items() if "." in key and isinstance(scheme, str)}
    weights = {
        key: scheme
        for key, scheme in types.items()
        if key.endswith(".weight") and not key.startswith(model.mtp_prefixes)
    }
    return CheckpointSummary(
        directory=directory,
        experts=only(scheme for key, scheme in weights.items() if ".mlp.experts." in key),
        attention=only(
            scheme
            for key, scheme in weights.items()
            if key.removesuffix(".weight").endswith((".q_a_proj", ".kv_a_proj_with_mqa", ".q_b_proj"))
        ),
        raw=raw,
        config=config,
        model=model,
        types=types,
        group_size=content.get("group_size"),
    )


def only(kinds: Any) -> str:
    distinct = set(kinds)
    return FLOAT if not distinct else next(iter(distinct)) if len(distinct) == 1 else MIXED
