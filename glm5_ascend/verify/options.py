"""Options of `verify`, for the command and the function."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from glm5_ascend.options import Argument, Option, StrPath
from glm5_ascend.verify.engines import ServingEngine


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `verify`.

    Attributes:
        deep: read and check the values too, not only names, dtypes and shapes; always done with `against`.
    """

    directory: Annotated[StrPath, Argument("DIR", "Quantized checkpoint.")]
    _: KW_ONLY
    against: Annotated[
        StrPath | None,
        Option(
            "Source checkpoint: dequantize and compare every tensor.",
            "SRC",
        ),
    ] = None
    engine: Annotated[ServingEngine | str | None, Option("Also report how ENGINE would load it.", "ENGINE")] = None
    deep: bool = True
