"""What the lowered text of each kernel must look like: where it runs, what the cube multiplies, what is copied how.

Whether the tiles fit a core's memories is level 3's to say: the device's compiler plans them (`device_compiler`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.proof.lowering import Lowered


@dataclass(frozen=True)
class Expected:
    """Of one kernel in one mode.

    Attributes:
        mix_mode: mix (cube and vector cores) or aiv (vector cores alone).
        matmuls: [M x K] x [K x N] of the cube's products, with the type of the operands.
        rows: sizes of the rows that are gathered, each by one copy.
        single: loops that load or store one element at a time.
    """

    mix_mode: str
    matmuls: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    single: int = 0


#: At GLM-5's real sizes, by kernel and quant mode.
EXPECTED = {
    "score_pages, bf16": Expected("mix", ("32x128 x 128x128 bf16 -> f32",) * 2),
    "score_pages, i8": Expected("mix", ("32x128 x 128x128 i8 -> i32",) * 2),
    "gather_rows": Expected("aiv", rows=("1x512xbf16", "1x64xbf16")),
    "unpack_rows": Expected("aiv", rows=("1x8xi32", "1x512xi8", "1x64xbf16")),
    "score_rows": Expected("mix", ("64x512 x 512x64 bf16 -> f32", "64x64 x 64x64 bf16 -> f32") * 2),
    "normalize_scores": Expected("aiv"),
    "weigh_rows": Expected("mix", ("64x256 x 256x256 bf16 -> f32",)),
    "quantize_rows": Expected("aiv"),
    "linear": Expected("mix", ("16x512 x 512x64 i8 -> i32",)),
    "absorb": Expected("mix", ("16x64 x 64x512 bf16 -> f32",)),
    "rotate": Expected("aiv"),
    "write_latents": Expected("aiv"),
}


def expected(lowered: Lowered) -> Expected:
    """The entry of EXPECTED for this text."""
    key = lowered.kernel
    if key == "score_pages":
        key += ", i8" if "xi8>, tensor" in lowered.text else ", bf16"
    return EXPECTED[key]


def matmuls(text: str) -> tuple[str, ...]:
    """Every `linalg.matmul`, in order."""
    tensor = r"tensor<(\d+x\d+)x(\w+)>"
    matches = re.findall(rf"linalg\.matmul .*?ins\(.*? : {tensor}, {tensor}\) outs\(.*? : {tensor}\)", text)
    return tuple(f"{a} x {b} {kind} -> {result}" for a, kind, b, _, _, result in matches)


def scattered(text: str) -> tuple[tuple[str, ...], int]:
    """The loops over scattered addresses: rows that are copied whole, and how many go element by element."""
    rows, single = [], 0
    for end in re.finditer(r"\} \{ExtractedLoadOrStore[^}]*\}", text):
        body = text[text.rindex("scf.for", 0, end.start()) : end.start()]
        copies = re.findall(r"memref\.copy .*? : memref<(1x[\dx]*\w+), strided", body)
        if len(copies) == 1 and "parallel_loop" in end[0]:
            rows.append(copies[0])
        else:
            single += 1
    return tuple(rows), single


def findings(lowered: Lowered) -> list[str]:
    """Describe the differences from the expected structure."""
    want, text, differences = expected(lowered), lowered.text, []
    seen = matmuls(text)
    if lowered.mix_mode != want.mix_mode:
        differences.append(f"runs on {lowered.mix_mode}, not {want.mix_mode}")
    if seen != want.matmuls:
        differences.append(f"multiplies {seen}, not {want.matmuls}")
    rows, single = scattered(text)
    if rows != want.rows:
        differences.append(f"gathers {rows}, not {want.rows}")
    if single != want.single:
        differences.append(f"has {single} loops over single elements, not {want.single}")
    differences += [f"calls {name}" for name in re.findall(r"call @(\w+)", text)]
    for shape in {row.removeprefix("1x") for row in rows}:
        if re.search(rf"arith\.select .*tensor<\d+x{shape}>", text):
            differences.append(f"selects over a tile of gathered rows {shape}")
    return differences
