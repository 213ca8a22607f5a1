"""Formats of quantities in reports and on the terminal."""

from __future__ import annotations


def format_bytes(nbytes: float) -> str:
    """12.3 MB or 418.0 GB (powers of ten, as disks are sold)."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def format_duration(seconds: float) -> str:
    """95 s, 12 min or 3.4 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
