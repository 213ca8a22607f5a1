"""The doctor's row on compiled kernels: the folder that keeps them between processes."""

from __future__ import annotations

import os

from glm5_kernels.registry import cache


def described() -> tuple[str, str, str]:
    """Value, status and note of the row."""
    folder = cache.folder()
    if folder is None:
        return (
            "none can be written; kernels are compiled at every start", "warning",
            f"export {cache.VARIABLE}=FOLDER, one that can be written",
        )  # fmt: skip
    functions, size = cache.count_compiled(folder)
    contents = f"{functions} compiled functions, {size / 2**20:.1f} MiB" if functions else "empty: glm5-ascend warm-up"
    source = cache.VARIABLE if os.environ.get(cache.VARIABLE) == str(folder) else "the user's cache folder"
    return str(folder), "info", f"{source}; {contents}"
