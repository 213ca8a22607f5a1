"""Compiles every kernel that runs on this CPU, so that later processes find it in the cache."""

from __future__ import annotations

from collections.abc import Iterator

from glm5_kernels import registry
from glm5_kernels.parity.cases import cases


def compile_all() -> Iterator[str]:
    """The name of each op before it is compiled; every variant of the parity suite is run once, nothing is compared.

    Raises:
        KernelUnavailableError: numba is not installed.
    """
    for op in registry.OPS:
        if registry.obstacle(op, "cpu", "cpu") is not None:
            continue
        yield op
        function = registry.load(op, "cpu")
        for case in cases(ops=(op,)):
            function(*case.arguments)
