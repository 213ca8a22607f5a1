"""`glm5-ascend serve` in a control group with little memory: its answers, times, and what it takes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from glm5_ascend.serve.local_server import free_port

#: Folder of the control groups below /sys/fs/cgroup, name of the limit; of version 1 and 2.
GROUPS = (("memory", "memory.limit_in_bytes"), ("", "memory.max"))


class FailedError(Exception):
    """A check failed."""


def require(right: bool, what: str) -> None:
    """Raise `FailedError` unless `right`."""
    if not right:
        raise FailedError(what)


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A control group with `limit` bytes of memory: the file for its members' ids, or `FailedError`."""
    for root, name in GROUPS:
        folder = Path("/sys/fs/cgroup", root, f"glm5-{os.getpid()}")
        with contextlib.suppress(OSError):
            folder.mkdir()
            (folder.parent / "cgroup.subtree_control").write_text("+memory")  # version 2 only
        if (folder / name).exists():
            (folder / name).write_text(str(limit))
            try:
                yield folder / "cgroup.procs"
            finally:
                remove(folder)
            return
        remove(folder)
    raise FailedError("no control group with a limit of memory can be made here (root?)")


def remove(folder: Path) -> None:
    """Remove a control group, whose last member may need a moment to give its memory back."""
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            folder.rmdir()
        time.sleep(0.1)


class Use(NamedTuple):
    """Processor seconds that all processes of a server have taken so far: in programs, and in Linux."""

    user: float
    system: float


@dataclass
class Server:
    """A running server.

    Attributes:
        members: of its control group. memory, ready: the lines that it printed.
        anonymous: the most anonymous bytes that its group had at a time.
    """

    process: subprocess.Popen[str]
    url: str
    members: Path
    memory: str = ""
    ready: str = ""
    anonymous: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def predicted(self) -> float:
        """Anonymous bytes by the memory line: copies, caches, and what it works with."""
        sizes = re.findall(r"of which (\S+) GB are copied|cache (\S+) GB|working memory (\S+) GB", self.memory)
        return sum(1e9 * float(size) for row in sizes for size in row if size)

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def watch(self) -> None:
        while not self.ended.wait(0.2):
            rows = dict(line.split() for line in self.members.with_name("memory.stat").read_text().splitlines())
            self.anonymous = max(self.anonymous, int(rows["total_rss"] if "total_rss" in rows else rows["anon"]))

    def use(self) -> Use:
        times = [process.cpu_times() for process in self.family()]
        return Use(sum(spent.user for spent in times), sum(spent.system for spent in times))


@contextlib.contextmanager
def serving(model: Path, members: Path, flags: list[str]) -> Iterator[Server]:
    """`glm5-ascend serve` from its ready line to Ctrl-C; prints what it prints, and checks its end."""
    port = free_port()
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"serve-{port}.log"
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(model), "--port", str(port), "--log", str(log), "--"]
    began = time.perf_counter()

    def join() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
        members.write_text(str(os.getpid()))

    print(f"$ glm5-ascend serve {model.name} -- {' '.join(flags)}", flush=True)
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=join
    )
    server = Server(process, f"http://127.0.0.1:{port}", members)
    watcher = threading.Thread(target=server.watch)
    watcher.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {time.perf_counter() - began:6.1f} s  {line}", end="", flush=True)
            if line.startswith("memory:"):
                server.memory = line
            if line.startswith("ready:"):
                server.ready = line
                break
        require(process.poll() is None and bool(server.ready), f"the server ended: {log.read_text()[-3000:]}")
        yield server
        family = server.family()
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)
        left = psutil.wait_procs(family, timeout=10)[1]
        print(f"  Ctrl-C: exit code {code}, {len(left)} processes left")
        require(code == 130 and not left, "Ctrl-C does not end the server")
    finally:
        server.ended.set()
        watcher.join()
        for member in server.family():
            member.kill()
        process.wait()
        log.unlink(missing_ok=True)
    print(f"  anonymous memory, the most of all processes: {server.anonymous / 1e9:.2f} GB", flush=True)


def ask(server: Server, prompt: str | list[int], tokens: int, what: str, temperature: float = 0.0) -> list[int]:
    """Return the ids of an answer, print where its time went; raises `FailedError` for fewer ids, or odd logprobs."""
    import openai  # vLLM needs it, the other benchmarks do not

    arrived: list[float] = []
    ids: list[int] = []
    began, before = time.perf_counter(), server.use()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=36000, max_retries=0)
    stream = client.completions.create(
        model="glm-5", prompt=prompt, max_tokens=tokens, temperature=temperature, logprobs=1, stream=True, seed=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    for event in stream:
        for choice in event.choices:
            new = choice.model_extra.get("token_ids") or []
            arrived += [time.perf_counter() - began] * len(new)
            ids += new
            if new and len(new) == len(ids):
                at_first = server.use()
            logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
            require(all(value is not None and -1e4 < value <= 0 for value in logprobs), f"{what}: logprobs {logprobs}")
    require(len(ids) == tokens, f"{what}: {len(ids)} tokens, expected {tokens}")
    after, count = server.use(), max(1, tokens - 1)
    since, seconds = (before, arrived[-1]) if tokens == 1 else (at_first, (arrived[-1] - arrived[0]) / count)
    use = Use((after.user - since.user) / count, (after.system - since.system) / count)
    print(
        f"  {what}: {ids}\n  first token after {arrived[0]:.1f} s; each later one {seconds:.2f} s, of which processor "
        f"{use.user:.2f} s in programs, {use.system:.2f} s in Linux",
        flush=True,
    )
    return ids
