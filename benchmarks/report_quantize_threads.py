"""What limits `quantize` on many cores: the tasks of each phase, timed with one thread, scheduled on more.

    python benchmarks/report_quantize_threads.py SRC OUT [--recipe w4a8] [--experts 256] [--threads 16 64]

Quantizes SRC with one worker and prints, for every layer, the seconds of its tasks, of the longest one, and of what
only the main thread does (journal, flushing, checksums), and the time of the layer on more cores: in each phase the
tasks go to the first free core, and the main thread's work goes on beside them; what lies between the phases is added.
A MoE layer's experts are counted as `--experts` of the same times. Also: how often a thread that wakes up finds the
interpreter's lock taken. Not in it: the memory bus, and a disk that others use.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.model.config_file import load_config
from glm5_ascend.quantize import pipeline
from glm5_ascend.quantize.api import quantize

LATE = 2e-4  # a thread that wakes up so much late waited for the lock


@dataclass
class Phase:
    """One `Workers.map`: seconds of its tasks, of the main thread between two results, and from begin to end."""

    name: str
    tasks: list[float] = field(default_factory=list)
    main: float = 0.0
    wall: float = 0.0

    def on(self, threads: int, copies: float) -> float:
        """Seconds on so many cores, with `copies` times the tasks."""
        repeated = self.tasks * max(1, math.ceil(copies))
        free = [0.0] * threads
        for seconds in repeated[: round(len(self.tasks) * copies)]:
            heapq.heapreplace(free, free[0] + seconds)
        return max(*free, self.main * copies)


@dataclass
class Layer:
    """The phases of a layer, and its seconds from begin to end."""

    phases: list[Phase] = field(default_factory=list)
    wall: float = 0.0

    @property
    def between(self) -> float:
        return max(0.0, self.wall - sum(phase.wall for phase in self.phases))


class Recorder(Workers):
    """Workers that write down how long everything took."""

    layers: ClassVar[list[Layer]] = [Layer()]
    began: ClassVar[float] = time.perf_counter()

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        phase = Phase(sys._getframe(1).f_code.co_qualname)
        self.layers[-1].phases.append(phase)

        def timed(item: Any) -> Any:
            began = time.perf_counter()
            result = function(item)
            phase.tasks.append(time.perf_counter() - began)
            return result

        began = time.perf_counter()
        for result in super().map(timed, items):
            handed_out = time.perf_counter()
            yield result
            phase.main += time.perf_counter() - handed_out
        phase.wall = time.perf_counter() - began

    @classmethod
    def progress(cls, text: str, done: float, total: int) -> None:
        """End a layer; the first one has what comes before the layers, too."""
        if done >= 1 and done == int(done):
            now = time.perf_counter()
            cls.layers[-1].wall, cls.began = now - cls.began, now
            cls.layers.append(Layer())


def watch_lock(stop: threading.Event, waits: list[float]) -> None:
    """Sleep again and again; how late the thread wakes up shows whether another one has the interpreter's lock."""
    while not stop.is_set():
        began = time.perf_counter()
        time.sleep(0.002)
        waits.append(time.perf_counter() - began - 0.002)


def report(layer: Layer, name: str, copies: float, threads: Sequence[int]) -> None:
    """Print a layer's phases, and its efficiency."""
    print(f"\n{name}\n| phase | tasks | seconds | longest | main thread |" + "".join(f" {n} cores |" for n in threads))
    print("|" + "---|" * (5 + len(threads)))
    work, walls = layer.between, [layer.between] * len(threads)
    for phase in layer.phases:
        times = copies if phase.name.endswith("_experts") else 1.0
        on = [phase.on(n, times) for n in threads]
        work += times * (sum(phase.tasks) + phase.main)
        walls = [wall + seconds for wall, seconds in zip(walls, on, strict=True)]
        print(
            f"| {phase.name} | {round(len(phase.tasks) * times)} | {times * sum(phase.tasks):.2f} | "
            f"{max(phase.tasks, default=0.0):.2f} | {times * phase.main:.2f} |" + "".join(f" {s:.2f} |" for s in on)
        )
    print(f"| between | | | | {layer.between:.2f} |" + f" {layer.between:.2f} |" * len(threads))
    shares = [f"{work / n / wall:.0%} of {n} cores: {wall:.1f} s" for n, wall in zip(threads, walls, strict=True)]
    print(f"one core {work:.1f} s; " + "; ".join(shares))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="w4a8")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--threads", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--samples", type=int, default=32)
    args = parser.parse_args()
    pipeline.Workers = Recorder  # type: ignore[attr-defined, misc]
    stop, waits = threading.Event(), list[float]()
    watcher = threading.Thread(target=watch_lock, args=(stop, waits))
    watcher.start()
    try:
        quantize(
            args.source, args.out, recipe=args.recipe, samples=args.samples, threads=1, progress=Recorder.progress,
            restart=True,
        )  # fmt: skip
    finally:
        stop.set()
        watcher.join()
    config = load_config(args.source)
    for number, layer in enumerate(layer for layer in Recorder.layers if layer.phases):
        kind = ("MoE" if config.is_moe(number) else "dense") + ", with the embedding and the head" * (number == 0)
        report(layer, f"layer {number}, {kind}", args.experts / config.n_routed_experts, args.threads)
    late = sum(wait > LATE for wait in waits) / max(1, len(waits))
    print(
        f"\nthe interpreter's lock was taken at {late:.1%} of {len(waits)} looks: "
        f"at most {1 / max(late, 1e-9):.0f} threads can work at a time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
