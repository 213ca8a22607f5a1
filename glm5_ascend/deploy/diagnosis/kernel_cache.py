"""The doctor's row on compiled kernels: where they are kept between processes."""

from __future__ import annotations

from glm5_kernels.registry import cache


def described() -> tuple[str, str, str]:
    """Value, status and note of the row."""
    place = cache.choose()
    if place.folder is None:
        return (
            f"none: {place.why}; kernels are compiled at every start", "warning",
            f"export {cache.VARIABLE}=FOLDER, one that can be written",
        )  # fmt: skip
    functions, size = cache.count_compiled(place)
    kept = f"{functions} compiled functions, {size / 2**20:.1f} MiB" if functions else "empty: glm5-ascend warm-up"
    return str(place.folder), "info", f"{place.why}; {kept}"
