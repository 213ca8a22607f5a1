"""Options of `quantize`, for the command and the function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from glm5_ascend.errors import ConfigError
from glm5_ascend.options import Argument, Option, StrPath

CALIBRATION, RUN = "Calibration", "Run"
#: Options that `analyze` shares with `quantize`.
SOURCE = Argument("SRC", "Directory of a GLM-5 checkpoint (bf16, fp16 or FP8).")
RECIPE = Option("Shipped recipe (w4a8, w8a8, w4a8-best, glm-5.3-w4a8, glm-5.3-w4a8c8, ...), or a YAML file.", "NAME")
CALIB = Option(
    "Texts or chats: .jsonl, .json, .csv, .txt, also .gz; .parquet.",
    "FILE",
    default_text="the recipe's",
    panel=CALIBRATION,
)
SAMPLES = Option("Most sequences.", min=1, max=1_000_000, panel=CALIBRATION)
SEQ_LEN = Option("Tokens per sequence.", min=16, max=1_048_576, panel=CALIBRATION)
#: No disk and no memory has so much; the sums over it stay exact.
LARGEST_SIZE = 2**60


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of `quantize`."""

    source: Annotated[StrPath, SOURCE]
    out: Annotated[StrPath, Argument("OUT", "Directory to write; appears complete or not at all.")]
    recipe: Annotated[str, RECIPE] = "w4a8"
    _: KW_ONLY
    calib: Annotated[StrPath | None, CALIB] = None
    samples: Annotated[int, SAMPLES] = 64
    seq_len: Annotated[int, SEQ_LEN] = 512
    seed: Annotated[int, Option("Seed of the random rotations.", min=0, max=2**63 - 1)] = 1234
    overwrite: Annotated[bool, Option("Replace a checkpoint that this tool wrote.")] = False
    threads: Annotated[
        int | None,
        Option("Cores to use; the result does not depend on it.", min=1, max=4096, default_text="all", panel=RUN),
    ] = None
    max_ram: Annotated[
        int | str | None,
        Option("Memory limit, such as 4GiB.", "SIZE", default_text="half of the machine's", panel=RUN),
    ] = None
    restart: Annotated[bool, Option("Discard an unfinished run of OUT.", panel=RUN)] = False
    device: Annotated[str, Option("cpu, npu, npu:N, cuda or cuda:N.", "NAME", panel=RUN)] = "cpu"
    dry_run: Annotated[bool, Option("Check everything, print plan, time and memory; write nothing.", panel=RUN)] = False


def parse_size(value: int | str | None, option: str) -> int | None:
    """Bytes of "4GiB", "500MB", a plain number or an int; None stays None.

    Raises:
        ConfigError: no size, or none above zero; names `option`.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    if value is None:
        return None
    try:
        size = TypeAdapter(ByteSize).validate_python(value)
    except (ValidationError, ValueError, OverflowError):
        size = ByteSize(0)
    if not 0 < size <= LARGEST_SIZE:
        raise ConfigError(f"{option}: {str(value)[:40]!r} is not a size", "give bytes, or e.g. 4GiB or 500MB")
    return int(size)
