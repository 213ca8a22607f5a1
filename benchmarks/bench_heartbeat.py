"""The tail of a burst when the engine of one of two replicas hangs, without and with `deploy heartbeat`.

    PATH=.../router/bin:$PATH OMP_NUM_THREADS=1 python benchmarks/bench_heartbeat.py --work work/heartbeat [--json FILE]

Needs vllm-router on PATH (pip install vllm-router, in an environment of its own). Two servers of the demo model in W4A8
behind the rendered router script; a burst of requests in conversations; when a quarter of them is answered, SIGSTOP for
the engine of the first server. Its HTTP process lives and answers /health, so the router goes on sending to it.
What is not answered after --patience seconds counts as lost.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from glm5_ascend.deploy.heartbeat import FleetHeartbeat
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.serve.local_server import free_port, server
from glm5_ascend.serve.router import RunningRouter

START_S = 600.0
BEAT_S, MISSES, TIMEOUT_S = 2.0, 3, 10.0


def process_tree(port: int) -> list[psutil.Process]:
    """The server of a port with all its processes."""
    for process in psutil.Process().children():
        if str(port) in process.cmdline():
            return [process, *process.children(recursive=True)]
    raise SystemExit(f"no server on port {port}")


def engine(port: int) -> psutil.Process:
    return next(
        process for process in process_tree(port) if "EngineCore" in " ".join([process.name(), *process.cmdline()])
    )


@contextlib.contextmanager
def router(ports: list[int], work: Path) -> Iterator[str]:
    script, port = work / "router.sh", free_port()
    script.write_text(rendered_texts(load("cpu"), "shell", "/models/glm5")["router.sh"])
    workers = " ".join(f"http://127.0.0.1:{number}" for number in ports)
    command = ["bash", str(script), "--host", "127.0.0.1", "--prometheus-port", str(free_port())]
    with (work / "router.log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, "WORKERS": workers, "PORT": str(port)}, stdout=log, stderr=log
        )
        try:
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def ask(url: str, number: int, patience: float) -> float | None:
    """Seconds until the whole answer was there; None: not in time, or an error."""
    hello = [{"role": "user", "content": f"What is {11 + number % 80} + {20 + number % 60}?"}]
    body = {"model": "glm-5", "messages": hello, "temperature": 0, "max_tokens": 128, "ignore_eos": True}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=patience)
    began = time.monotonic()
    try:
        headers = {"Content-Type": "application/json", "X-Session-ID": f"conversation-{number % 16}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        reply.read()
        return time.monotonic() - began if reply.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def burst(model: Path, work: Path, with_heartbeat: bool, requests: int, patience: float) -> dict[str, Any]:
    """One burst on two fresh servers."""
    flags = ["--max-num-seqs", "8"]
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(server(model, work / f"server-{i}.log", flags)) for i in range(2)]
        url = stack.enter_context(router(ports, work))
        for number in range(16):  # compiles and warms up
            ask(url, number, START_S)
        hung, done, over = engine(ports[0]), threading.Semaphore(0), threading.Event()

        def end(worker: str) -> None:
            for process in process_tree(int(worker.rpartition(":")[2])):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

        def beat() -> None:
            heart = FleetHeartbeat(RunningRouter(url), MISSES, TIMEOUT_S, end, report=print)
            while not over.is_set():
                heart.run(BEAT_S, beats=1)
                over.wait(BEAT_S)

        def one(number: int) -> float | None:
            try:
                return ask(url, number, patience)
            finally:
                done.release()

        beating = threading.Thread(target=beat, daemon=True)
        if with_heartbeat:
            beating.start()
        with ThreadPoolExecutor(requests) as pool:
            futures = [pool.submit(one, number) for number in range(requests)]
            for _ in range(requests // 4):
                done.acquire()
            hung.send_signal(signal.SIGSTOP)
            seconds = [future.result() for future in futures]
        over.set()
        if with_heartbeat:
            beating.join()
        with contextlib.suppress(psutil.NoSuchProcess):
            hung.send_signal(signal.SIGCONT)
    good = sorted(value for value in seconds if value is not None)
    return {
        "heartbeat": with_heartbeat, "sent": requests, "completed": len(good), "lost": requests - len(good),
        "median_s": round(statistics.median(good), 2), "p95_s": round(good[int(0.95 * (len(good) - 1))], 2),
        "longest_s": round(good[-1], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("work/heartbeat"))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--patience", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    source, quantized = args.work / "demo", args.work / "w4a8"
    program = [sys.executable, "-m", "glm5_ascend"]
    if not quantized.exists():
        subprocess.run([*program, "demo-model", source], check=True)
        subprocess.run([*program, "quantize", source, quantized, "--recipe", "w4a8", "--quiet"], check=True)
    rows = [burst(quantized, args.work, on, args.requests, args.patience) for on in (False, True)]
    print("| heartbeat | sent | completed | lost | median, s | 95 %, s | longest, s |\n|---|---|---|---|---|---|---|")
    for row in rows:
        cells = ("sent", "completed", "lost", "median_s", "p95_s", "longest_s")
        print(f"| {'with' if row['heartbeat'] else 'without'} | " + " | ".join(str(row[cell]) for cell in cells) + " |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
