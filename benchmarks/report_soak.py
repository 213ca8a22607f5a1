"""Half an hour of unfriendly traffic: is the CPU server's memory flat, and does it answer as before?

    python benchmarks/report_soak.py CHECKPOINT [--minutes 30] [--clients 8] [--out soak.csv]

Starts `glm5-ascend serve` and sends mixed requests: chats, completions, tools, streams, drawn and greedy, log-probs. Of
them 20 % are disturbed in equal parts: the client goes away in the middle of a stream, or before the answer, or sends
what no server should take. Memory is the resident set of all of the server's processes, every ten seconds; its slope
is a line's through all points after the first five minutes. Ends with 1 if an undisturbed request fails, if a bad one
is answered with anything but 4xx, or if a fixed question's answer is another than before.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from glm5_ascend.serve.local_server import server

DISTURBED = 0.2
WARM_UP_S = 300
SAMPLE_S = 10
TIMEOUT_S = 300
#: A cache that traffic fills within the first minutes: its pages count as resident when they are first written.
FLAGS = ("--max-num-seqs", "8", "--max-model-len", "2048", "--num-gpu-blocks-override", "512")
PROBE = {"prompt": "[gMASK]<sop><|user|>Who are you?<|assistant|></think>", "max_tokens": 24, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CIRCLE = {"name": "a", "schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
#: A JSON schema and a grammar that have no end: vLLM 0.32 answers 500, and must go on.
ENDLESS = tuple(
    (CHAT, json.dumps({"messages": HELLO, **body}).encode())
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": CIRCLE}},
        {"structured_outputs": {"grammar": 'root ::= root "a"'}},
    )
)
BAD: tuple[tuple[str, bytes], ...] = ENDLESS + tuple(
    (path, body if isinstance(body, bytes) else json.dumps(body).encode())
    for path, body in (
        (CHAT, b"{"), (CHAT, b"\xff\xfe"), (CHAT, {"messages": 5}), (CHAT, {"messages": HELLO, "max_tokens": -1}),
        (CHAT, {"messages": HELLO, "temperature": "hot"}), (CHAT, {"messages": [{"role": "user", "content": 7}]}),
        (CHAT, {"messages": HELLO, "model": "another"}),
        ("/v1/completions", {"prompt": [10**9], "max_tokens": 4}), ("/v1/completions", {"prompt": "a " * 20000}),
        ("/v1/completions", {"prompt": "a", "n": 10**6}), ("/v1/nothing", {}),
    )
)  # fmt: skip


def good(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request that must succeed."""
    a, b = draw.randrange(2, 90), draw.randrange(2, 90)
    text = draw.choice(
        ("Who are you?", f"What is {a} + {b}?", "What is the weather in Oslo?", "Tell me a story. " * 30)
    )
    more: dict[str, Any] = {"max_tokens": draw.randrange(1, 64), "stream": draw.random() < 0.5}
    more |= {"temperature": 0} if draw.random() < 0.5 else {"temperature": 0.8, "seed": draw.randrange(99)}
    if draw.random() < 0.3:
        prompt = f"[gMASK]<sop><|user|>{text}<|assistant|></think>"
        return "/v1/completions", more | {"prompt": prompt} | ({"logprobs": 3} if draw.random() < 0.3 else {})
    chat = more | {"messages": [{"role": "user", "content": text}]}
    return CHAT, chat | ({"tools": [TOOL]} if draw.random() < 0.3 else {})


def send(port: int, path: str, body: bytes) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection


def one(port: int, draw: random.Random) -> tuple[str, str]:
    """(kind, what went wrong or "") of one request."""
    path, body = good(draw)
    kind = draw.choice(("dropped", "cancelled", "bad")) if draw.random() < DISTURBED else "good"
    if kind == "bad":
        path, data = draw.choice(BAD)
    else:
        data = json.dumps(body | {"model": "glm-5"} | ({"stream": True} if kind == "dropped" else {})).encode()
    connection = send(port, path, data)
    try:
        if kind == "cancelled":
            time.sleep(draw.random() / 10)
            return kind, ""
        answer = connection.getresponse()
        if kind == "dropped":
            answer.read(draw.randrange(1, 2000))
            return kind, "" if answer.status == 200 else f"HTTP {answer.status}"
        text = answer.read()
    finally:
        connection.close()
    if kind == "bad":
        refused = 400 <= answer.status < 500 or (answer.status == 500 and (path, data) in ENDLESS)
        return kind, "" if refused else f"HTTP {answer.status} for {data[:200]!r}: {text[:200]!r}"
    whole = text.rstrip().endswith(b"[DONE]") if body["stream"] else b'"finish_reason":"' in text.replace(b" ", b"")
    return kind, "" if answer.status == 200 and whole else f"HTTP {answer.status}: {text[-300:]!r}"


def probe(port: int) -> str:
    connection = send(port, "/v1/completions", json.dumps(PROBE | {"model": "glm-5"}).encode())
    text: str = json.loads(connection.getresponse().read())["choices"][0]["text"]
    connection.close()
    return text


def client(port: int, seed: int, stop: threading.Event, count: Counter[str], wrong: list[str]) -> None:
    draw = random.Random(seed)
    while not stop.is_set():
        try:
            kind, problem = one(port, draw)
        except (OSError, http.client.HTTPException) as error:
            kind, problem = "good", f"{type(error).__name__}: {error}"
        count[kind] += 1
        if problem:
            wrong.append(problem)


def resident(port: int) -> int:
    """Bytes of all processes of the server on this port."""
    root = next(p for p in psutil.Process().children() if f"{port}" in " ".join(p.cmdline()))
    return sum(member.memory_info().rss for member in (root, *root.children(recursive=True)))


def slope(points: list[tuple[float, int]]) -> float | None:
    """MiB per hour after the warm-up; None before there is anything after it."""
    late = [(t, size) for t, size in points if t >= WARM_UP_S]
    if len(late) < 3:
        return None
    return statistics.linear_regression([t / 3600 for t, _ in late], [size / 2**20 for _, size in late]).slope


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path, help="CSV: seconds, bytes")
    args = parser.parse_args()
    stop, count, wrong, points = threading.Event(), Counter[str](), list[str](), list[tuple[float, int]]()
    log = Path(tempfile.mkstemp(prefix="soak-", suffix=".log")[1])
    print(f"log: {log}")
    with server(args.checkpoint, log, FLAGS) as port:
        before = probe(port)
        clients = [threading.Thread(target=client, args=(port, n, stop, count, wrong)) for n in range(args.clients)]
        for thread in clients:
            thread.start()
        began = time.monotonic()
        while (now := time.monotonic() - began) < args.minutes * 60:
            points.append((now, resident(port)))
            time.sleep(SAMPLE_S)
        stop.set()
        for thread in clients:
            thread.join()
        after = probe(port)
    if args.out:
        with args.out.open("w", newline="") as file:
            csv.writer(file).writerows([("seconds", "bytes"), *((f"{t:.0f}", size) for t, size in points)])
    print(f"{sum(count.values())} requests: " + ", ".join(f"{n} {kind}" for kind, n in sorted(count.items())))
    curve = points[:: max(1, len(points) // 12)]
    print("minute: MiB   " + "   ".join(f"{t / 60:.1f}: {size / 2**20:.0f}" for t, size in [*curve, points[-1]]))
    if (rate := slope(points)) is not None:
        print(f"slope after {WARM_UP_S // 60} minutes: {rate:+.1f} MiB per hour")
    print(f"the probe's answer is {'the same' if after == before else f'{after!r}, was {before!r}'}")
    for problem in wrong[:10]:
        print(f"wrong: {problem}")
    return int(bool(wrong) or after != before)


if __name__ == "__main__":
    sys.exit(main())
