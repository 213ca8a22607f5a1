"""MLA preprocess with our own int8 products where a library's are slow: for a few tokens."""

from __future__ import annotations

from functools import partial

from glm5_kernels import vnni
from glm5_kernels.mla_preprocess import reference

mla_preprocess = partial(reference.mla_preprocess, matmul=vnni.matmul)
