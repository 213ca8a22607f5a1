"""What the user asked `quantize` for; names are the command line's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Quantizer(StrEnum):
    """Who quantizes: this package, or an installed msModelSlim."""

    own = "own"
    msmodelslim = "msmodelslim"


@dataclass(frozen=True)
class QuantizeOptions:
    """Arguments of one quantization.

    Attributes:
        recipe: name of a shipped recipe or path of a YAML file.
        calib: calibration text, .jsonl or .txt; None takes the recipe's dataset.
        samples, seq_len: at most this many sequences of this many tokens.
        seed: of the random rotations.
        threads: cores to use, None for all; the result does not depend on it.
        max_ram: bytes of memory to stay within, None for half of the machine's.
        device: "cpu", "npu", "npu:N", "cuda" or "cuda:N": where the arithmetic runs.
        restart: discard an unfinished run instead of going on with it.
        command: the command line, for the provenance file.
    """

    source: Path
    out: Path
    recipe: str = "w4a8"
    calib: Path | None = None
    samples: int = 64
    seq_len: int = 512
    seed: int = 1234
    overwrite: bool = False
    command: str = ""
    threads: int | None = None
    max_ram: int | None = None
    restart: bool = False
    device: str = "cpu"
