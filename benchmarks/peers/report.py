"""Processes of `bench_peers.py`, their answers, and the tables."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.plan.inputs import tokens_per_step

OURS, Q8, Q4, IK = "ours W4A8", "llama.cpp Q8_0", "llama.cpp Q4_0", "ik_llama.cpp Q4_0"
#: Ours with the MTP layer.
MTP = "ours, MTP"
#: Timed steps of one request, and of several at once.
STEPS, BATCH_STEPS = 12, 6


@dataclass
class Engine:
    """One engine with its model.

    Attributes:
        command: words before the commands of client.cpp; `{threads}` stands for the number of threads.
        size: bytes of the model's files. reads: bytes that one token reads, of `layers` and `head`.
        layers: of the real model, and of this one.
    """

    command: Sequence[object]
    size: int
    reads: dict[str, float]
    layers: tuple[int, int]


@dataclass
class Results:
    """Answers of all processes by (engine, threads, command), one per round; cores that other programs used.

    failed: the processes that did not end with 0, by engine, with the code and the log.
    """

    answers: dict[tuple[str, int, str], list[dict[str, Any]]] = field(default_factory=dict)
    foreign: list[float] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def run(
        self, name: str, threads: int, words: Iterable[object], log: Path, env: dict[str, str] | None = None
    ) -> bool:
        """Run a process to its end, collect its answers, and tell whether it succeeded."""
        began, busy, used = time.perf_counter(), busy_seconds(), own_seconds()
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | (env or {})
        with log.open("a") as file:
            command = [str(word).replace("{threads}", str(threads)) for word in words]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, check=False)
        spent = time.perf_counter() - began
        self.foreign.append(max(0.0, (busy_seconds() - busy - own_seconds() + used) / spent))
        for line in done.stdout.splitlines():
            if line.startswith('{"command"'):
                answer = json.loads(line)
                self.answers.setdefault((name, threads, answer["command"]), []).append(answer)
        note = "" if done.returncode == 0 else f", exit code {done.returncode}: {log}"
        if note:
            self.failed[name] = note.removeprefix(", ")
        print(f"{name}, {threads} thread(s): {spent:.0f} s, others used {self.foreign[-1]:.2f} cores{note}", flush=True)
        return done.returncode == 0

    def rounds(self, name: str, threads: int, command: str, value: str) -> list[float]:
        """A value of each round: the median of a list."""
        values = [answer[value] for answer in self.answers.get((name, threads, command), []) if value in answer]
        return [statistics.median(one) if isinstance(one, list) else one for one in values]

    def median(self, *key: Any) -> float | None:
        return statistics.median(values) if (values := self.rounds(*key)) else None


def busy_seconds() -> float:
    """Seconds of all processors since the start of the machine, without idle and waiting."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:7])) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def per_second(results: Results, names: Sequence[str], title: str, key: tuple[int, str, str], count: float) -> str:
    """Row of a table: count / value of each engine by round, and ours over the best of the others."""
    threads, command, value = key
    unit = 1.0 if value == "seconds" else 1e3
    cells, middle = [], {}
    for name in names:
        speeds = [unit * count / one for one in results.rounds(name, threads, command, value)]
        cells.append(" / ".join(f"{one:.3g}" for one in speeds) or "not run")
        if speeds:
            middle[name] = statistics.median(speeds)
    others = [speed for name, speed in middle.items() if name != OURS]
    ratio = f"**{middle[OURS] / max(others):.2f}**" if OURS in middle and others else ""
    return f"| {title} | {threads} | {' | '.join(cells)} | {ratio} |"


def speed_table(args: argparse.Namespace, results: Results, names: Sequence[str]) -> list[str]:
    rows = [f"| tokens/s by round | threads | {' | '.join(names)} | ours / best |", "|---" * (len(names) + 3) + "|"]
    for threads in args.threads:
        for context in args.contexts:
            command = f"decode:1:{context}:{STEPS}"
            for title, value in (("", "ms"), (", without the head", "body_ms")):
                key = threads, command, value
                rows.append(per_second(results, names, f"decode, 1 request, context {context}{title}", key, 1))
        for batch in (batch for batch in args.batches if batch > 1):
            key = threads, f"decode:{batch}:{args.contexts[0]}:{BATCH_STEPS}", "ms"
            rows.append(per_second(results, names, f"decode, {batch} requests, context {args.contexts[0]}", key, batch))
        for length in args.prefill:
            rows.append(
                per_second(results, names, f"prefill of {length}", (threads, f"prefill:{length}", "seconds"), length)
            )
    return rows


def with_drafts(args: argparse.Namespace, drafts: int) -> str:
    """Command of ours.py for one request with so many draft tokens, at the acceptance of a healthy GLM-5."""
    return f"mtp:{drafts}:{tokens_per_step(drafts, None):.2f}:{args.contexts[0]}:{STEPS}"


def ratios(whole: dict[str, float], few: dict[str, float]) -> dict[str, float]:
    """The bytes of GLM-5 over those of the measured model, of `layers` and `MTP`; 0 where that has none."""
    return {name: whole[name] / few[name] if few[name] else 0.0 for name in ("layers", "MTP")}


def whole_model_table(
    args: argparse.Namespace, results: Results, engines: dict[str, Engine], times: dict[int, dict[str, float]]
) -> list[str]:
    """Tokens/s of all layers of the model, with and without the heads, by the measured times of a few layers.

    Args:
        times: the `ratios` of our models, by draft tokens.
    """
    names = [*engines, *(f"{MTP}, {drafts} draft(s)" for drafts in args.mtp)]
    rows = [f"| {args.family}, tokens/s | threads | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for threads in args.threads:
        plain, bare = list[str](), list[str]()
        for name, engine in engines.items():
            key = name, threads, f"decode:1:{args.contexts[0]}:{STEPS}"
            whole, body = (results.median(*key, value) or math.nan for value in ("ms", "body_ms"))
            layers = body * (times[0]["layers"] if name == OURS else engine.layers[0] / engine.layers[1])
            plain.append(f"{1e3 / (layers + whole - body):.3f}")
            bare.append(f"{1e3 / layers:.3f}")
        for drafts in args.mtp:
            key = MTP, threads, with_drafts(args, drafts)
            body, draft, rest = (results.median(*key, name) or math.nan for name in ("body_ms", "draft_ms", "rest_ms"))
            layers = body * times[drafts]["layers"] + draft * times[drafts]["MTP"]
            made = 1e3 * tokens_per_step(drafts, None)
            plain.append(f"{made / (layers + rest):.3f}")
            bare.append(f"{made / layers:.3f} (4 layers {body:.0f}, MTP {draft:.0f}, the rest {rest:.0f} ms)")
        rows += [f"| one request | {threads} | {' | '.join(plain)} |"]
        rows += [f"| without the head | {threads} | {' | '.join(bare)} |"]
    return rows


def memory_table(args: argparse.Namespace, results: Results, engines: dict[str, Engine]) -> list[str]:
    """Files, memory, load time, bytes per token and the share of the bandwidth at the first context."""
    head = [f"GB/s, {threads} thread(s) (share)" for threads in args.threads]
    titles = ["", "file GB", "resident GB (own)", "peak GB", "load s (start s)", "GB per token (head)", *head]
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, engine in engines.items():
        get = lambda command, value, name=name: results.median(name, args.threads[0], command, value) or 0.0  # noqa: E731
        whole = sum(engine.reads.values())
        row = [name, f"{engine.size / 1e9:.2f}", f"{get('load', 'rss_gb'):.2f} ({get('load', 'own_gb'):.2f})"]
        start = f" ({get('load', 'ready'):.0f})" if name == OURS else ""
        row += [f"{get('end', 'peak_gb'):.2f}", f"{get('load', 'seconds'):.1f}{start}"]
        row.append(f"{whole / 1e9:.2f} ({engine.reads['head'] / 1e9:.2f})")
        for threads in args.threads:
            ms = results.median(name, threads, f"decode:1:{args.contexts[0]}:{STEPS}", "ms")
            rate = whole / ms / 1e6 if ms else 0.0
            row.append(f"{rate:.1f} ({rate / read_rate(results, threads):.0%})")
        rows.append(f"| {' | '.join(row)} |")
    return rows


def read_rate(results: Results, threads: int) -> float:
    """GB/s at which this machine reads, with the better kind of pages."""
    return max(results.median(f"read, huge pages {pages}", threads, "read", "gb_s") or math.nan for pages in "01")


def tables(
    args: argparse.Namespace,
    results: Results,
    engines: dict[str, Engine],
    times: dict[int, dict[str, float]],
) -> list[list[str]]:
    """All tables of the measurements, and what else ran on the machine."""
    rows = [speed_table(args, results, list(engines)), memory_table(args, results, engines)]
    rows += [whole_model_table(args, results, engines, times)]
    rates = ", ".join(f"{threads} thread(s) read {read_rate(results, threads):.1f} GB/s" for threads in args.threads)
    others = f"others used {statistics.median(results.foreign):.2f} cores (median of processes), at most"
    return [*rows, [f"{rates}; {others} {max(results.foreign):.2f}"]]
