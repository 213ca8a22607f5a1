"""Write a model whose layers share indexers, as GLM-5.2's do, from one in which every layer has its own indexer.

    python benchmarks/tools/share_indexers.py SRC OUT --types full,full,shared,shared,full

OUT computes another function than SRC: layers attend to the keys that an earlier indexer selected. Compare quantized
models with OUT, not with SRC.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint.source import SourceCheckpoint

INDEX = "model.safetensors.index.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--types", default="full,full,shared,shared,full", help="full or shared, of every main layer")
    args = parser.parse_args()
    kinds = args.types.split(",")
    shutil.copytree(args.source, args.out)
    path = args.out / "config.json"
    pattern = "".join(kind[0].upper() for kind in kinds)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"indexer_types": kinds, "index_topk_pattern": pattern}))
    gone = tuple(f"model.layers.{n}.self_attn.indexer." for n, kind in enumerate(kinds) if kind == "shared")
    for file in args.out.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(gone)}
        save_file(tensors, file, metadata={"format": "pt"})
    if (args.out / INDEX).is_file():
        index = json.loads((args.out / INDEX).read_text())
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.startswith(gone)}
        (args.out / INDEX).write_text(json.dumps(index))
    print(
        f"{args.out}: indexers in {pattern.count('F')} of {len(SourceCheckpoint(args.out).config.indexer_types)} layers"
    )


if __name__ == "__main__":
    main()
