"""Limits of the control groups that this process is in. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
