"""The list of servers of a running vllm-router."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from glm5_ascend.errors import CheckFailedError, shown
from glm5_ascend.files.untrusted import parse_json
from glm5_ascend.serve.connection import Limits, exchange, server_address

_LIMITS = Limits(30.0, 30.0, 1024**2)


@dataclass(frozen=True)
class RunningRouter:
    """url: http://HOST:PORT. key: API key, empty for none.

    Raises (all methods): MissingEnvironmentError where it does not answer, CheckFailedError for an HTTP error.
    """

    url: str
    key: str = ""

    def workers(self) -> list[str]:
        """URLs of the servers that receive requests."""
        with exchange("GET", f"{self.url}/list_workers", None, self.key, _LIMITS) as reply:
            data = reply.read()
        try:
            urls = parse_json(data)["urls"]
        except (ValueError, KeyError, TypeError):
            urls = None
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            raise CheckFailedError(f"{self.url}/list_workers: {shown(data, 120)}", "is this vllm-router?")
        return urls

    def remove(self, worker: str) -> None:
        """Send it no new requests; running ones continue."""
        self._post("remove_worker", worker)

    def add(self, worker: str) -> None:
        """Send it requests."""
        self._post("add_worker", worker)

    def _post(self, what: str, worker: str) -> None:
        with exchange("POST", f"{self.url}/{what}?url={quote(worker, safe=':/')}", None, self.key, _LIMITS) as reply:
            reply.read()


def connected(url: str, key: str = "") -> RunningRouter:
    """A running router. Raises `ConfigError` if `url` is not a URL, and as `RunningRouter` if no router answers."""
    router = RunningRouter(server_address(url), key)
    router.workers()
    return router
