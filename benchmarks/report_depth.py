"""How errors of rounding add up over the layers: KL to bf16 with only the first layers of a model rounded.

    python -m benchmarks.training DIR --deep
    python benchmarks/report_depth.py DIR [--work DIR] [--recipes NAME ...] [--every N] [--peer PYTHON] [--int8 N ...]

A line per recipe: the first 4, 8, ... layers as stored, with the integer arithmetic that the server runs, all others
with the fp32 weights from before they were rounded. The last column is the whole checkpoint. Below a recipe: its KL as
a ratio to that of the first recipe, window by window, with a paired 95 % interval. With --peer, also msModelSlim's
W4A8 and W8A8 (whole checkpoints only), made from the same source and text, each next to the recipes of its bits. With
--int8, also w4a8-best with the routed experts of so many layers in INT8, the noisiest ones by `analyze`.

The error per layer does not show this: errors of different layers can cancel, and norms can make them larger.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tools.fidelity_checkpoints import float_weights, peer_program, quantized, quantized_by_peer, with_int8_experts
from tools.fidelity_parts import FirstLayers

from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.intervals import mean_interval
from glm5_ascend.fidelity.evaluation.windows import read_windows
from glm5_ascend.model.config_file import load_config

WINDOW = 512
RECIPES = "w4a8", "w4a8-best", "rtn-w4a8", "w8a8", "w8a8-best"
PEER = "w4a8", "w8a8"
MOST_ACCURATE = "w4a8-best"


def by_depth(source: Path, out: Path, recipe: str, depths: list[int], windows: list[torch.Tensor]) -> torch.Tensor:
    """Mean KL of every window, [depths, windows]."""
    checkpoint = quantized(source, out, recipe, [])
    floats = float_weights(source, out.with_name(f"{out.name}-floats"), recipe)
    return torch.stack([compare(FirstLayers(checkpoint, floats, d), source, windows).kl.mean(1) for d in depths])


def with_int8(options: argparse.Namespace, windows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mean KL of every window of whole checkpoints, by name: MOST_ACCURATE with INT8 experts in some layers."""
    recipes = with_int8_experts(options.model, MOST_ACCURATE, options.int8, options.work) if options.int8 else {}
    checkpoints = {
        f"{MOST_ACCURATE}, layers with INT8 experts: {count}": quantized(
            options.model, options.work / path.stem, str(path), []
        )
        for count, path in recipes.items()
    }
    return {name: compare(path, options.model, windows).kl.mean(1) for name, path in checkpoints.items()}


def ratio(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Ratio of the means of two rows of windows, with a paired 95 % interval."""
    low, high = mean_interval(ours, theirs) or (0.0, 0.0)
    return f"{float(ours.mean() / theirs.mean()):.2f} [{low:.2f}, {high:.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, default=Path("work/depth"))
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=4, help="layers between two columns (default %(default)s)")
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens, at most (default %(default)s)")
    parser.add_argument("--peer", type=Path, help="python of a virtual environment with msmodelslim")
    parser.add_argument("--int8", nargs="+", type=int, default=[], metavar="N", help="layers with INT8 experts")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()

    options.work.mkdir(parents=True, exist_ok=True)
    config = load_config(options.model)
    windows = read_windows(None, options.model, WINDOW, options.windows)
    layers = config.num_hidden_layers
    depths = [*range(options.every, layers, options.every), layers]
    print(f"{options.model.name}: {layers} layers, {len(windows) * (WINDOW - 1)} positions")
    print(f"{'KL, first layers rounded:':26}" + "".join(f"{depth:>22}" for depth in depths))
    results: dict[str, torch.Tensor] = {}
    peers: dict[str, list[float]] = {}
    for recipe in options.recipes:
        results[recipe] = kl = by_depth(options.model, options.work / recipe, recipe, depths, windows)
        print(f"{recipe:26}" + "".join(f"{float(row.mean()):22.5f}" for row in kl), flush=True)
        first = results[options.recipes[0]]
        if kl is not first:
            cells = (f"{ratio(*pair):>22}" for pair in zip(kl, first, strict=True))
            print(f"{f'  to {options.recipes[0]}':26}" + "".join(cells), flush=True)
    whole = {recipe: kl[-1] for recipe, kl in results.items()} | with_int8(options, windows)
    for bits in PEER if options.peer else ():
        program = peer_program(options.peer, options.work)
        checkpoint = quantized_by_peer(options.model, options.work / f"peer-{bits}", bits, [], program)
        theirs = compare(checkpoint, options.model, windows).kl.mean(1)
        print(f"msModelSlim {bits}, whole: {float(theirs.mean()):.5f}")
        for name, kl in whole.items():
            if bits in name:
                print(f"  {name}: {float(kl.mean()):.5f}, to it: {ratio(kl, theirs)}", flush=True)
        peers[bits] = theirs.tolist()
    if options.json:
        figures = {recipe: dict(zip(depths, kl.tolist(), strict=True)) for recipe, kl in results.items()}
        figures |= {name: {layers: kl.tolist()} for name, kl in whole.items() if name not in results}
        figures |= {f"msModelSlim {bits}": {layers: kl} for bits, kl in peers.items()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
