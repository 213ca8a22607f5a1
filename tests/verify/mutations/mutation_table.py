"""Prints the mutation table: every kind of defect x checkpoints x random positions, and how many verify reported.

python -m tests.verify.mutations.mutation_table --positions 50
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.support.tiny_model import quantize_tiny, write_tiny_model
from tests.verify.mutations.trial import KINDS, ImpossibleError, trial
from tests.verify.support.checkpoints import LAYOUTS, Shelf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=50, help="random positions per kind and checkpoint")
    parser.add_argument("--kinds", nargs="*", default=sorted(KINDS), help="only these")
    parser.add_argument("--checkpoints", nargs="*", default=list(LAYOUTS), help="only these")
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_tiny_model(folder / "source", shards=2)

        def quantize(recipe: str, origin: Path) -> Path:
            place = Path(tempfile.mkdtemp(dir=folder))
            return quantize_tiny(origin, place / "out", recipe)

        shelf = Shelf(folder, source, quantize)
        print("| kind | theme | needs the source | checkpoints | positions | caught |\n|---|---|---|---|---|---|")
        for kind in (KINDS[name] for name in options.kinds):
            tried, caught, possible = 0, 0, 0
            for checkpoint in options.checkpoints:
                try:
                    for position in range(options.positions):
                        seed = f"{checkpoint} {position}"
                        problem = trial(kind, shelf[checkpoint], seed, folder)
                        tried += 1
                        caught += problem is None
                        if problem is not None:
                            print(f"MISSED {kind.name} on {seed}: {problem}", file=sys.stderr)
                except ImpossibleError:
                    continue
                possible += 1
            missed += tried - caught
            needs = "yes" if kind.against else "hashes" if kind.by_hash else ""
            print(f"| {kind.name} | {kind.theme} | {needs} | {possible} | {tried} | {caught} |", flush=True)
    print(f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
