"""Which instruction makes int8 products on this processor, up to how many tokens, and what makes them beyond.

All are exact: the same int32 in each. `int8_dots_intrinsics` has the code, `int4_dots_intrinsics` that for weights with
codes of 4 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from glm5_kernels.compiled.processor import features

_WIDENED = "fp32 products of as many columns as they are exact for"
IN_BLOCKS = "the same, so many at a time"


class Int8Way(NamedTuple):
    """feature: LLVM's name; "" is any processor. tokens: more of them are multiplied as `beyond` says."""

    feature: str
    instruction: str
    tokens: int
    beyond: str

    @property
    def library(self) -> bool:
        """Whether torch's own int8 product is one of vectors on such a processor; else it loops over single bytes."""
        return self.beyond.startswith("torch")

    @property
    def code(self) -> type[np.generic]:
        """What a token's codes are held as: int8 + 128 for VPDPBUSD, wide for PMADDWD, else int8 as they are."""
        if "VPDPBUSD" in self.instruction:
            return np.uint8
        return np.int8 if self.feature in ("i8mm", "dotprod") else np.int16


#: The first whose feature the processor has.
WAYS = (
    Int8Way("avx512vnni", "AVX-512 VNNI, VPDPBUSD of 64 bytes", 16, "torch._int_mm, or TDPBSSD where there is AMX"),
    Int8Way("avxvnni", "AVX-VNNI, VPDPBUSD of 32 bytes", 256, IN_BLOCKS),
    Int8Way(
        "avx512bw", "AVX-512, PMADDWD of 32 bytes widened to int16; PMADDUBSW of 64 with 4-bit codes", 256, IN_BLOCKS
    ),
    Int8Way("avx2", "AVX2, PMADDWD of 16 bytes widened to int16; PMADDUBSW of 32 with 4-bit codes", 256, IN_BLOCKS),
    Int8Way("sse4.1", "SSE4.1, PMADDWD of 8 bytes widened to int16; PMADDUBSW of 16 with 4-bit codes", 256, IN_BLOCKS),
    Int8Way("i8mm", "ARM i8mm, SMMLA of 2 x 8 bytes", 256, IN_BLOCKS),
    Int8Way("dotprod", "ARM dotprod, SDOT of 16 bytes", 256, IN_BLOCKS),
    Int8Way("", "multiplications of single lanes", 256, _WIDENED),
)
CHOSEN = next(way for way in WAYS if not way.feature or way.feature in features())
