"""Byte sizes as users write them."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

from glm5_ascend.errors import ConfigError

#: No disk and no memory has so much; the sums over it stay exact.
LARGEST = 2**60


def parse_size(value: int | str | None, option: str) -> int | None:
    """Bytes of "4GiB", "500MB", a plain number or an int; None stays None.

    Raises:
        ConfigError: no size, or none above zero; names `option`.
    """
    if value is None:
        return None
    try:
        size = TypeAdapter(ByteSize).validate_python(value)
    except (ValidationError, ValueError, OverflowError):
        size = ByteSize(0)
    if not 0 < size <= LARGEST:
        raise ConfigError(f"{option}: {str(value)[:40]!r} is not a size", "give bytes, or e.g. 4GiB or 500MB")
    return int(size)
