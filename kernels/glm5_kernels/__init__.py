"""GLM-5's fused operators as plain functions on torch tensors. Needs torch; knows no model and no server.

One module per op: its contract (maths, shapes, errors) and its reference, the slow, obvious version.
"""

from __future__ import annotations

if __name__ != "glm5_kernels":  # `kernels/` is a source root, not a package: every module would exist twice
    raise ImportError(f"import glm5_kernels, not {__name__}: kernels/ is a source root (put it on sys.path)")
