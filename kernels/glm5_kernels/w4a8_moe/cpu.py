"""The routed experts with compiled integer arithmetic (`int8_rows`); the same numbers as the reference."""

from __future__ import annotations

from functools import partial

from glm5_kernels.int8_rows import COMPILED
from glm5_kernels.w4a8_moe import reference

w4a8_moe = partial(reference.w4a8_moe, arithmetic=COMPILED)
