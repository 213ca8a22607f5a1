"""Building blocks of the kernels that numba compiles."""

from glm5_kernels import cache

cache.prepare()  # before any of them is decorated
