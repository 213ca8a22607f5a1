"""The int8 linear layer with compiled integer arithmetic (`int8_rows`); the same numbers as the reference."""

from __future__ import annotations

from functools import partial

from glm5_kernels.int8_linear import reference
from glm5_kernels.int8_rows import COMPILED

int8_linear = partial(reference.int8_linear, arithmetic=COMPILED)
