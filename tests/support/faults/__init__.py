"""Faults that a test must find, one line of the product each: `python -m tests.support.faults` plants them."""

from __future__ import annotations

from tests.support.faults import kernels, offline, online, structure

FAULTS = (*kernels.FAULTS, *offline.FAULTS, *online.FAULTS, *structure.FAULTS)
