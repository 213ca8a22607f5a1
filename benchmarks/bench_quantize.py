"""Speed, memory and error of our quantizer against msModelSlim 26.1.0, in one run, on one model.

    python -m venv msm && msm/bin/pip install torch==2.13.0
    msm/bin/pip install msmodelslim==26.1.0 transformers==5.4.0
    python benchmarks/bench_quantize.py --peer msm/bin/python --work work/bench [--rounds 3]

Both quantize the same 0.67 GB GLM-5 (tools/make_model.py --preset mid) with msModelSlim's stock W4A8 recipe and the
same texts, as whole processes from a cold interpreter, interleaved. Then: time (median, ratio), peak RSS, and the
accuracy of both outputs as `glm5-ascend eval` prints it, on texts behind those of the calibration.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench_commands import run

HERE = Path(__file__).parent
SEED_TEXT = HERE.parent / "glm5_ascend/quantize/data/calibration.jsonl"
#: Held-out texts, and tokens of each.
WINDOWS, WINDOW = 24, 128


def texts(count: int, length: int) -> list[str]:
    """`count` texts of `length` characters of ASCII, one token each; the seed text over and over."""
    records = [json.loads(line) for line in SEED_TEXT.read_text(encoding="utf-8").splitlines()]
    whole = "\n".join(json.dumps(record, ensure_ascii=True) for record in records)
    whole *= 1 + count * length // len(whole)
    return [whole[i * length : (i + 1) * length] for i in range(count)]


def stock_recipe(peer: Path, out: Path, calibration: Path) -> Path:
    """msModelSlim's glm_5_w4a8 with the layer numbers of the middle model: 0 is dense, 2 is MTP."""
    code = "import importlib.util as u; print(u.find_spec('msmodelslim').submodule_search_locations[0])"
    package = subprocess.run([peer, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    lines = (Path(package) / "lab_practice/glm_5/glm_5_w4a8.yaml").read_text().splitlines()
    lines = [line for line in lines if "layers.1." not in line and "layers.2." not in line]
    text = "\n".join(lines).replace("model.layers.78", "model.layers.2")
    out.write_text(text.replace("qwen3_cot_w4a4.json", str(calibration)) + "\n")
    return out


@dataclass
class Bench:
    """One model, one text; times of both quantizers, by name."""

    work: Path
    count: int
    length: int
    peer: Path | None
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "msmodelslim": []})

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self.model, self.texts = self.work / "model", self.work / "texts.json"
        if not self.model.exists():
            subprocess.run([sys.executable, HERE / "tools/make_model.py", self.model, "--preset", "mid"], check=True)
        self.texts.write_text(json.dumps(texts(self.count, self.length)))
        self.recipe = stock_recipe(self.peer, self.work / "stock.yaml", self.texts) if self.peer else None
        self.outs = {name: self.work / f"out-{name}" for name in self.seconds}

    def command(self, name: str) -> list[object]:
        out = self.outs[name]
        if name == "ours":
            words = [sys.executable, "-m", "glm5_ascend", "quantize", self.model, out, "--calib", self.texts, "--quiet"]
            return [*words, "--samples", self.count, "--seq-len", self.length, "--recipe", self.recipe or "w4a8"]
        words = [self.peer, HERE / "tools/msmodelslim_cpu.py", "quant", "--model_path", self.model, "--save_path", out]
        return [*words, "--model_type", "GLM-5", "--device", "cpu", "--config_path", self.recipe]

    def run(self, rounds: int) -> None:
        """Interleaved rounds; of four and more rounds the peer takes part in the first one only."""
        for number in range(rounds):
            for name in self.seconds if number % 2 == 0 else reversed(self.seconds):
                if name == "msmodelslim" and (not self.peer or (number and rounds >= 4)):
                    continue
                shutil.rmtree(self.outs[name], ignore_errors=True)
                spent = run([str(word) for word in self.command(name)], self.work / f"{name}.log")
                self.seconds[name].append(spent.seconds)
                print(
                    f"round {number + 1}: {name} {spent.seconds:.1f} s, peak RSS {spent.peak / 1e9:.2f} GB", flush=True
                )

    def compare(self) -> None:
        """Let `eval` print the accuracy of both outputs, on texts behind those of the calibration."""
        used, held_out = self.count * self.length, self.work / "held-out.txt"
        held_out.write_text(texts(1, used + WINDOWS * WINDOW)[0][used:])
        words = ["--against", self.model, "--text", held_out, "--window", str(WINDOW), "--windows", str(WINDOWS)]
        for name, out in self.outs.items():
            if out.exists():
                print(f"{name}:", flush=True)
                subprocess.run([sys.executable, "-m", "glm5_ascend", "eval", out, *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, help="python of an environment with msmodelslim; default: only ours")
    parser.add_argument("--work", type=Path, default=Path("work/bench-quantize"))
    parser.add_argument("--rounds", type=int, default=3, help="0: only compare the outputs of an earlier run in --work")
    parser.add_argument("--texts", type=int, nargs=2, default=(8, 64), metavar=("COUNT", "LENGTH"))
    args = parser.parse_args()
    count, length = args.texts
    bench = Bench(args.work, count, length, args.peer)
    bench.run(args.rounds)
    bench.compare()
    if bench.seconds["msmodelslim"]:
        ours, theirs = (statistics.median(bench.seconds[name]) for name in ("ours", "msmodelslim"))
        print(f"msModelSlim {theirs:.1f} s / ours {ours:.1f} s = {theirs / ours:.1f} x")


if __name__ == "__main__":
    main()
