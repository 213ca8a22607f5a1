"""Replicas of our CPU server behind the rendered router script, and clients that note what became of each request."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from glm5_ascend.serve.local_server import free_port
from tests.support.server_process import wait_for, wait_until_healthy

NO_BYTE, COMPLETE, BROKEN = "no first byte", "complete", "broken off"


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@dataclass
class Program:
    """A program in a process group of its own, ended with all its children."""

    command: list[str]
    log: Path
    environ: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, **self.environ}
            )

    def wait_until_healthy(self, url: str) -> None:
        """Until /health of `url` answers; fails with the end of its log if it has ended before."""
        assert self.process is not None
        wait_until_healthy(f"{url}/health", self.process, self.log)

    def kill(self) -> None:
        """kill -9 of it and of all that it has started: a server left alone would end its streams in order."""
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(self.process.pid)
                for process in (*parent.children(recursive=True), parent):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            self.process.wait()
            self.process = None


@dataclass
class Replica(Program):
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """Sum over labels; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
                text = reply.read().decode()
        except OSError:
            return 0.0
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))

    def engine(self) -> psutil.Process:
        """The process that computes: below the HTTP server's, which goes on answering /health without it."""
        wait_for(lambda: bool(self._engines()), "the engine")
        return self._engines()[0]

    def _engines(self) -> list[psutil.Process]:
        assert self.process is not None
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in family if "EngineCore" in " ".join([process.name(), *process.cmdline()])]


def replica(directory: Path, log: Path) -> Replica:
    port = free_port()
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(directory), "--port", str(port)]
    command += ["--", "--shutdown-timeout", "60"]
    return Replica(command, log, {"OMP_NUM_THREADS": "1"}, port=port)


@dataclass
class Request:
    """One chat request and its fate.

    bytes_seen: the status line of the answer came. vLLM sends it before the first token, and the router passes it on:
    from there on a stream can no longer go to another server.
    """

    url: str
    session: str
    body: dict[str, Any]
    fate: str = NO_BYTE
    status: int = 0
    detail: str = ""
    text: str = ""
    bytes_seen: bool = False

    def run(self) -> None:
        host = self.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=300)
        headers = {"Content-Type": "application/json", "X-Session-ID": self.session}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(self.body), headers)
            reply = connection.getresponse()
            self.status, self.bytes_seen = reply.status, True
            done = False
            for line in reply:
                self.text += line.decode(errors="replace")
                done = done or "[DONE]" in line.decode(errors="replace")
            self.fate = COMPLETE if self.status == 200 and (done or not self.body.get("stream")) else BROKEN
        except (OSError, http.client.HTTPException) as error:
            self.fate, self.detail = BROKEN, f"{type(error).__name__}: {error}"
        finally:
            connection.close()


def chat(messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    return {"model": "glm-5", "messages": messages, "temperature": 0, "max_tokens": 64, **options}
