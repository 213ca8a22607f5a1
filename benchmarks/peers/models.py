"""The models of `bench_peers.py` in the format of each engine. What is made is not made again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

from peers.build import HERE, client, run, sources

VOCABULARY = 154880
#: Ids of the longest prompt, and a few more.
IDS = 20480


@dataclass(frozen=True)
class Models:
    """A few layers of a family at its own widths, random.

    Attributes:
        work: folder of the peers' programs. folder: of the models.
        sizes: words of make_model.py. layers: of the real model, and of these.
        recipe: one without calibration, one scale per row, as the peers round theirs.
    """

    work: Path
    folder: Path
    sizes: tuple[str, ...]
    layers: tuple[int, int]
    recipe: str

    @classmethod
    def of(cls, family: str, work: Path) -> Models:
        """GLM-5: 13.1 GB in bf16, 6.8 GB in our W4A8. Flash: three layers of KDA and one of DSA, 14.4 and 5.4 GB."""
        if family == "glm-5":
            sizes = "--preset", "real", "--layers", "4", "--dense", "1", "--experts", "32"
            return cls(work, work, sizes, (78, 4), "rtn-w4a8")
        sizes = "--preset", "flash", "--layers", "4", "--dense", "1", "--experts", "64"
        return cls(work, work / family, sizes, (45, 4), "flash-w4a8")

    def ids(self) -> Path:
        """File of random token ids, int32, the same in every run."""
        path = self.work / "ids.bin"
        if not path.exists():
            generator = random.Random(0)
            path.write_bytes(array("i", (generator.randrange(VOCABULARY) for _ in range(IDS))).tobytes())
        return path

    def _make(self, folder: Path, *more: str) -> None:
        run(["rm", "-rf", folder], self.work / "logs/model.log")
        command = [sys.executable, HERE.parent / "tools/make_model.py", folder, *self.sizes, *more]
        run(command, self.work / "logs/model.log")

    def _quantize(self, source: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "glm5_ascend", "quantize", source, folder, "--recipe", self.recipe, "--quiet"]
        run(command, self.work / "logs/w4a8.log")

    def source(self) -> Path:
        """In bf16."""
        folder, part = self.folder / "model", self.folder / "model.part"
        if not folder.exists():
            self._make(part)
            part.rename(folder)
        return folder

    def quantized(self) -> Path:
        """In our W4A8."""
        folder = self.folder / "w4a8"
        if not folder.exists():
            self._quantize(self.source(), folder)
        return folder

    def with_mtp(self) -> Path:
        """A model of the same sizes with an MTP layer, in our W4A8."""
        folder, source = self.folder / "w4a8-mtp", self.folder / "mtp.bf16"
        if not folder.exists():
            self._make(source, "--mtp", "1")
            self._quantize(source, folder)
            run(["rm", "-rf", source], self.work / "logs/model.log")
        return folder

    def q8_0(self) -> Path:
        """As GGUF by llama.cpp's converter: all matrices Q8_0."""
        path, part, log = self.folder / "q8_0.gguf", self.folder / "part.q8_0.gguf", self.work / "logs/gguf.log"
        if not path.exists():
            run([sys.executable, HERE / "convert.py", sources(self.work, "llama.cpp"), self.source(), part], log)
            part.rename(path)
        return path

    def q4_0(self, jobs: int) -> Path:
        """As GGUF in Q4_0, rounded by llama.cpp from Q8_0; its head is Q6_K."""
        path, part = self.folder / "q4_0.gguf", self.folder / "part.q4_0.gguf"
        if not path.exists():
            quantize = client(self.work, "llama.cpp", jobs)
            run([quantize, "quantize", self.q8_0(), part, str(jobs)], self.work / "logs/gguf.log")
            part.rename(path)
        return path

    def gguf_bytes(self, path: Path) -> dict[str, float]:
        """Bytes that one token reads of a GGUF: `layers` and `head`."""
        command = [sys.executable, HERE / "convert.py", sources(self.work, "llama.cpp"), "--bytes", path]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
        answer: dict[str, float] = json.loads(done.stdout)
        return answer
