"""A free port for a server, outside the range of outgoing connections, which could take it before the server does."""

from __future__ import annotations

import random
import secrets
import socket

import pytest

from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.serve.local_server import free_port


def test_a_taken_port_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = taken.getsockname()[1], free_port()
        ports = iter([port, port, free])
        monkeypatch.setattr(secrets, "choice", lambda _: next(ports))
        assert free_port() == free
        monkeypatch.setattr(secrets, "choice", lambda _: port)
        with pytest.raises(MissingEnvironmentError, match="no port"):
            free_port()


def test_two_processes_with_the_same_seed_get_different_ports() -> None:
    """vLLM seeds `random` with 0 in every process."""
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(10)])
    assert drawn[0] != drawn[1]
