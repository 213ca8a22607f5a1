"""Bytes that no training wrote: text of a failed download inside a shard, and values of an impossible size."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

#: A matrix or vector whose typical value is smaller is judged as if it were this.
MATRIX_BODY, VECTOR_BODY = 2.0**-6, 1.0
#: Largest value of a source over its typical one. Outlier channels have 1,000 times the others, single weights 10^6.
#: bf16 made of lower-case letters has 2^67 to 2^117, a flipped exponent bit 2^64 and more.
_IMPOSSIBLE = 2.0**32
#: Bytes; a shorter run of printable ones happens in weights.
_RUN = 64
#: One word of 8 bytes in so many is looked at, for time, and the next one where it could be text: some two lie in every
#: run of 55 bytes, and in pieces of `_LARGE` bytes and more in every run of 519.
_STRIDE, _LARGE_STRIDE, _LARGE = 4, 62, 2**20
_HIGH_BITS = np.int64(-0x7F7F7F7F7F7F7F80)
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{%d,}" % _RUN)
#: Values that bytes at every other place of 64 must have: gains of norms as bf16 are printable, too (0.63 to 0.99 is
#: a letter and "?"), but their exponents are six bytes at most.
_VARIED = 8
_SAMPLE = 1024


def text_in(tensor: torch.Tensor) -> str | None:
    """Say where the bytes of a stored tensor are text: "holds text, not values: '<!DOCTYPE html>'"."""
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    stride = _STRIDE if len(data) < _LARGE else _LARGE_STRIDE
    words = data[: len(data) // 8 * 8].view(np.int64)
    places = np.flatnonzero(_ascii_only(words[:-1:stride])) * stride
    places = places[_ascii_only(words[places + 1])]
    end = 0
    for offset in (8 * places).tolist():
        if offset < end:
            continue
        start, end = max(offset - _RUN, 0), offset + 8 * stride * 2 + _RUN
        for run in _TEXT.finditer(data[start:end].tobytes()):
            if all(len(set(run[0][parity::2])) >= _VARIED for parity in (0, 1)):
                shown = run[0][:40].decode("ascii")
                return f"holds text, not values: {shown!r}"
    return None


def _ascii_only(words: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """A bool for each word; rows of zeros are many, and no text."""
    return ((words & _HIGH_BITS) == 0) & (words != 0)


def times_typical(values: torch.Tensor, largest: float, body: float, most: float = 2.0**16) -> float:
    """`largest` over the median magnitude of a sample of `values`, which is taken to be `body` to `most`."""
    flat = values.reshape(-1)
    sample = flat[:: max(len(flat) // _SAMPLE, 1)].float().abs()
    return largest / min(max(float(sample.nanmedian()), body), most)


def nonsense_in(stored: torch.Tensor, values: torch.Tensor) -> str | None:
    """Say why rows of a source cannot be weights: NaN, infinity, text, or a size that no weight has.

    Args:
        stored: the rows as stored. values: the same in fp32.
    """
    if not len(values):
        return None
    if text := text_in(stored):
        return text
    flat, body = values.reshape(-1), MATRIX_BODY if values.dim() > 1 else VECTOR_BODY
    if float(flat.dot(flat)) < (_IMPOSSIBLE * body) ** 2:  # takes half of the time of a search for the largest value
        return None
    if count := int((~flat.isfinite()).sum()):
        return f"{count} values are NaN or infinite"
    largest = float(flat.abs().max())
    if largest > _IMPOSSIBLE * body and (times := times_typical(values, largest, body, 1.0)) > _IMPOSSIBLE:
        return f"its largest value is {largest:.3g}, {times:.1g} times its typical one: no weight has that"
    return None
