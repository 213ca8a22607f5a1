"""`python -m glm5_ascend.deploy.gate PROGRAM [ARG...]`: a proxy that asks its clients for the key.

vllm-ascend's example proxy sends the key to the servers by itself, and asks nobody for it: alone it would be an open
door to closed servers. PROGRAM is run as it is, but for the application that it gives to uvicorn.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from glm5_ascend.serve.middleware import RequireApiKey

#: What a probe asks for; the proxy answers it with counts alone.
PROBED = "/healthcheck"


class ProxyGate(RequireApiKey):
    """401 without the key of VLLM_API_KEY, but for health checks; does nothing where there is no key."""

    def _may_pass(self, scope: dict[str, Any]) -> bool:
        probed = scope.get("path") == PROBED and scope.get("method") in ("GET", "HEAD")
        return probed or super()._may_pass(scope)


def main(argv: list[str]) -> None:
    """Run a program with its application behind the gate."""
    import uvicorn

    start = uvicorn.run

    def guarded(app: Any, *args: Any, **options: Any) -> None:
        start(ProxyGate(app), *args, **options)

    vars(uvicorn)["run"] = guarded
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
