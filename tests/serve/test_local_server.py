"""A port for a server of our own: free, and none that an outgoing connection could take before the server starts."""

from __future__ import annotations

import random
import secrets
import socket
from pathlib import Path

import pytest

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.local_server import free_port


def test_outgoing_connections_do_not_get_it() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < lowest for port in (free_port() for _ in range(50)))


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = taken.getsockname()[1], free_port()
        drawn = iter([port, port, free])
        monkeypatch.setattr(secrets, "choice", lambda _: next(drawn))
        assert free_port() == free
        monkeypatch.setattr(secrets, "choice", lambda _: port)
        with pytest.raises(MissingEnvironmentError, match="no port"):
            free_port()


def test_a_seed_gives_no_port_twice() -> None:
    """Two engines that vLLM seeded alike ask at the same time."""
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(10)])
    assert drawn[0] != drawn[1]
