"""The model of `bench_peers.py` in the format of each engine. What is made is not made again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from array import array
from pathlib import Path

from peers.build import HERE, client, run, sources

VOCABULARY = 154880
#: Ids of the longest prompt, and a few more.
IDS = 20480
MODEL = ("--preset", "real", "--layers", "4", "--dense", "1", "--experts", "32")
#: Recipe without calibration: plain rounding, one scale per row, as the peers round theirs.
RECIPE = "rtn-w4a8"


def ids(work: Path) -> Path:
    """File of random token ids, int32, the same in every run."""
    path = work / "ids.bin"
    if not path.exists():
        generator = random.Random(0)
        path.write_bytes(array("i", (generator.randrange(VOCABULARY) for _ in range(IDS))).tobytes())
    return path


def _make(work: Path, folder: Path, *words: str) -> None:
    run(["rm", "-rf", folder], work / "logs/model.log")
    run([sys.executable, HERE.parent / "tools/make_model.py", folder, *words], work / "logs/model.log")


def _quantize(work: Path, source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "glm5_ascend", "quantize", source, folder, "--recipe", RECIPE, "--quiet"]
    run(command, work / "logs/w4a8.log")


def model(work: Path) -> Path:
    """GLM-5's widths in bf16, random: 4 layers, 32 experts, 13.1 GB."""
    folder, part = work / "model", work / "model.part"
    if not folder.exists():
        _make(work, part, *MODEL)
        part.rename(folder)
    return folder


def quantized(work: Path) -> Path:
    """The model in our W4A8, 6.8 GB."""
    folder = work / "w4a8"
    if not folder.exists():
        _quantize(work, model(work), folder)
    return folder


def with_mtp(work: Path) -> Path:
    """A model of the same sizes with an MTP layer, in our W4A8: 13 GB."""
    folder, source = work / "w4a8-mtp", work / "mtp.bf16"
    if not folder.exists():
        _make(work, source, *MODEL, "--mtp", "1")
        _quantize(work, source, folder)
        run(["rm", "-rf", source], work / "logs/model.log")
    return folder


def q8_0(work: Path) -> Path:
    """The model as GGUF by llama.cpp's converter, 7.0 GB: all matrices Q8_0."""
    path, part = work / "q8_0.gguf", work / "part.q8_0.gguf"
    if not path.exists():
        run(
            [sys.executable, HERE / "convert.py", sources(work, "llama.cpp"), model(work), part], work / "logs/gguf.log"
        )
        part.rename(path)
    return path


def q4_0(work: Path, jobs: int) -> Path:
    """The model as GGUF in Q4_0, rounded by llama.cpp from Q8_0; its head is Q6_K. 3.9 GB."""
    path, part = work / "q4_0.gguf", work / "part.q4_0.gguf"
    if not path.exists():
        quantize = client(work, "llama.cpp", jobs)
        run([quantize, "quantize", q8_0(work), part, str(jobs)], work / "logs/gguf.log")
        part.rename(path)
    return path


def gguf_bytes(work: Path, path: Path) -> dict[str, float]:
    """Bytes that one token reads of a GGUF: `layers` and `head`."""
    command = [sys.executable, HERE / "convert.py", sources(work, "llama.cpp"), "--bytes", path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer
