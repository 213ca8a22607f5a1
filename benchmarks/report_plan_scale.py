"""From 1 to 512 nodes on paper: throughput, cost, tails, and what limits them.

    python benchmarks/report_plan_scale.py [--out benchmarks/results] [--price 30]    # table, CSV, plots (matplotlib)

Requests grow with the machines: the same number per node. Ways to grow: engines of at most 4 nodes side by side,
or engines as wide as their experts allow, within a supernode (UB) or over RoCE. Nothing here was run; beyond 4 nodes no
public number checks it. With --price, of one node and hour, a column says what a million output tokens cost.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from glm5_ascend.plan.efficiency import fitted_efficiencies
from glm5_ascend.plan.hardware import load_hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import named
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.roofline import LINK, decode_step
from glm5_ascend.plan.tails import Arrivals, replica_tails
from glm5_ascend.plan.workload import Workload

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PER_NODE = 96  # requests at a time
LINK_NAMES = ("HCCS", "UB", "RoCE")
COLUMNS = ("nodes", "way", "layout", "tokens_per_s", "per_node", "tpot_ms", "ttft_p99_ms", "tpot_p99_ms", "links_share",
           "limited_by", "transfer_ms")  # fmt: skip


def layouts(nodes: int, dies: int) -> list[tuple[str, Layout]]:
    """Engines of 4 nodes side by side (half prefill, half decode), and one as wide as 256 experts allow."""
    if nodes < 4:
        engine = Engine(4 if nodes > 1 else 8, nodes * dies // (4 if nodes > 1 else 8), sequences=64)
        return [("small engines", Layout(engine))]
    ways = []
    wide = min(nodes, 2 * 256 // dies)
    for way, size in (("small engines", 4), ("wide engines", wide), ("wide engines over RoCE", wide)):
        half = size // 2 * dies
        prefill = Engine(8, half // 8, drafts=1, batched_tokens=8192, sequences=64, buffer_mb=400, eager_decode=True)
        decode = Engine(1, half, sequences=64, batched_tokens=256)
        ways.append((way, Layout(decode, prefill, nodes // size)))
    return ways if nodes > 4 else [ways[0], ways[2]]


def rows(sizes: Sequence[int]) -> list[dict[str, object]]:
    model, pod, efficiency = named("glm-5", "w4a8"), load_hardware("a3"), fitted_efficiencies()
    apart = pod.model_copy(update={"links": pod.links.model_copy(update={"pod": None})})
    out: list[dict[str, object]] = []
    for nodes in sizes:
        load = Workload(3500, 1500, PER_NODE * nodes)
        for way, layout in layouts(nodes, pod.dies_per_node):
            hardware = apart if way.endswith("RoCE") else pod
            p = predict(model, hardware, layout, efficiency, load)
            if p is None:
                continue
            tails = replica_tails(
                model, hardware, layout, efficiency, load, Arrivals(0.85 * p.output_per_second / load.output)
            )
            per_rank = max(1.0, p.running / layout.replicas / layout.decode.dp)
            step = decode_step(model, hardware, layout.decode, efficiency, per_rank, 4250)
            links = sum(step.by_limit.get(name, 0.0) for name in LINK_NAMES) / step.seconds
            wide = layout.decode.dies + (layout.prefill.dies if layout.prefill else 0)
            moved = load.prompt * p.memory.bytes_per_token / (layout.prefill.tp if layout.prefill else 1)
            transfer = 1e3 * moved / (hardware.link(wide).bandwidth * LINK) if layout.prefill else 0.0
            out.append(dict(zip(COLUMNS, (
                nodes, way, str(layout), round(p.output_per_second), round(p.output_per_second / nodes),
                round(1e3 * p.tpot, 1), round(1e3 * tails["ttft_p99"]), round(1e3 * tails["tpot_p99"], 1),
                round(links, 3), p.limited_by, round(transfer, 1)), strict=True)))  # fmt: skip
    return out


def plots(table: list[dict[str, object]], out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "plan"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for way, marker in (("small engines", "o"), ("wide engines", "s"), ("wide engines over RoCE", "^")):
        mine = [row for row in table if row["way"] == way]
        x = [row["nodes"] for row in mine]
        for axis, key, title in zip(
            axes, ("per_node", "tpot_p99_ms", "links_share"),
            ("output tokens/s per node", "p99 TPOT, ms", "share of a decode step on links"), strict=True,
        ):  # fmt: skip
            axis.plot(x, [row[key] for row in mine], marker=marker, label=way)
            axis.set(xscale="log", xlabel="nodes", title=title)
            axis.set_xticks(NODES, [str(n) for n in NODES], fontsize=8)
            axis.grid(alpha=0.3)
    for axis in axes:
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axes[0].legend()
    figure.savefig(out / "report_plan_scale.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--price", type=float, help="of one node and hour, in any currency")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    args = parser.parse_args()
    out: Path = args.out
    table, columns = rows(args.nodes), list(COLUMNS)
    if args.price is not None:
        columns.append("cost_per_million")
        for row in table:
            per_second = float(str(row["tokens_per_s"]))
            row["cost_per_million"] = round(args.price * int(str(row["nodes"])) / 3600 / per_second * 1e6, 3)
    shown = [column for column in columns if column != "layout"]
    print("| " + " | ".join(shown) + " |\n" + "|---" * len(shown) + "|")
    for row in table:
        print("| " + " | ".join(str(row[column]) for column in shown) + " |")
    out.mkdir(parents=True, exist_ok=True)
    with (out / "report_plan_scale.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(table)
    try:
        plots(table, out)
    except ImportError:
        print("no plots: pip install matplotlib")


if __name__ == "__main__":
    main()
