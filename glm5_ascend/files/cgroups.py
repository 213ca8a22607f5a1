"""Limits of the control groups that this process is in, and the memory that they leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def limits(controller: str, *files: tuple[str, ...]) -> Iterator[tuple[bool, list[str]]]:
    """Contents of files of this process's control group and of all groups above it, where they can be read.

    Args:
        controller: of version 1, such as "memory". files: their names in version 2, and in version 1.

    Yields:
        (True for version 1, the stripped text of each file), the closest group first.
    """
    for line in _OWN.read_text().splitlines() if _OWN.exists() else []:
        _, kinds, path = line.split(":", 2)
        first_version = controller in kinds.split(",")
        if kinds and not first_version:
            continue
        root = _ROOT / controller if first_version else _ROOT
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                yield first_version, [(folder / name).read_text().strip() for name in files[first_version]]
            except (OSError, ValueError):
                continue


def available_memory() -> int:
    """Bytes that new processes may take: of the machine, and of each control group above this process."""
    return min([psutil.virtual_memory().available, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[int]:
    """Limit minus use, where a group has a limit; its cache of files can be given back."""
    files = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for first_version, (limit, used, stat) in limits("memory", *((*names, "memory.stat") for names in files)):
        prefix, rows = "total_" if first_version else "", dict(line.split() for line in stat.splitlines())
        if limit != "max":
            cached = int(rows[f"{prefix}inactive_file"]) + int(rows[f"{prefix}active_file"])
            yield max(0, int(limit) - int(used) + cached)
