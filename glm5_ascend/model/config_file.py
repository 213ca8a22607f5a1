"""config.json of a folder, read and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError, Glm5Error
from glm5_ascend.files.untrusted import MAX_CONFIG_BYTES, read_json_object
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_json import language_keys, spec_of
from glm5_ascend.model.config_values import checked_config
from glm5_ascend.model.folder import check_path, refuse_other_formats


def load_config(directory: Path) -> ModelConfig:
    """Read and check `directory/config.json`.

    Raises:
        ConfigError: no such directory or file, not JSON, another architecture, a missing or impossible value.
    """
    return parse_config(read_config(directory), directory / "config.json")


def parse_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """`load_config` of a dictionary."""
    spec, keys = language_keys(raw, path)
    return checked_config(keys, spec, path)


def read_config(directory: Path, *, error: type[Glm5Error] = ConfigError) -> dict[str, Any]:
    """Return the keys of `directory/config.json` unchanged.

    Raises:
        ConfigError: no such directory or file. error: not valid JSON.
        CheckpointError: weights in a format that is not read here.
    """
    path = directory / "config.json"
    check_path(directory)
    raw = read_json_object(path, max_bytes=MAX_CONFIG_BYTES, error=error, fix="download the file again")
    if spec_of(raw) is not None:
        refuse_other_formats(directory, raw)
    return raw
