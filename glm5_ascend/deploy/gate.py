"""`python -m glm5_ascend.deploy.gate PROGRAM [ARG...]`: run a proxy that requires the API key from clients.

vllm-ascend's example proxy sends the key to the servers, but does not require it: without this gate anyone could use
the servers. PROGRAM runs unchanged, except that the application it passes to uvicorn is wrapped.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from glm5_ascend.serve.middleware import RequireApiKey

#: Path of health probes; the proxy answers with counts only.
PROBED = "/healthcheck"


class ProxyGate(RequireApiKey):
    """Answer 401 without the key in VLLM_API_KEY, except for health checks. Without a key everyone may pass."""

    def _may_pass(self, scope: dict[str, Any]) -> bool:
        probed = scope.get("path") == PROBED and scope.get("method") in ("GET", "HEAD")
        return probed or super()._may_pass(scope)


def main(argv: list[str]) -> None:
    import uvicorn

    start = uvicorn.run

    def guarded(app: Any, *args: Any, **options: Any) -> None:
        start(ProxyGate(app), *args, **options)

    vars(uvicorn)["run"] = guarded
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
