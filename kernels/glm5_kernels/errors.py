"""The errors this package raises."""

from __future__ import annotations


class KernelInputError(ValueError):
    """An argument of an op has a shape, dtype or value outside the op's contract."""


class UnsupportedVariantError(KernelInputError):
    """Arguments that fit the op's contract, but not this implementation; the message says which and why."""


class KernelUnavailableError(RuntimeError):
    """The implementation asked for cannot run here; the message names what is missing."""


def require_supported(kernel: str, fits: bool, complaint: str) -> None:
    """Raise `UnsupportedVariantError`, which says what `kernel` does instead, unless `fits`."""
    if not fits:
        raise UnsupportedVariantError(f"{kernel} {complaint}")
