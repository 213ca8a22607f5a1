"""MLA preprocess with compiled integer arithmetic (`int8_rows`); the same numbers as the reference."""

from __future__ import annotations

from functools import partial

from glm5_kernels.int8_rows import COMPILED
from glm5_kernels.mla_preprocess import reference

mla_preprocess = partial(reference.mla_preprocess, arithmetic=COMPILED)
