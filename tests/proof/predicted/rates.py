"""What one die of an A2 or A3 does per cycle, and where that was published.

`quality`: vendor (Huawei's documents and platform files), measured (published measurements on a 910B), derived
(arithmetic on those), assumed (nothing published was found: the value is ours).
"""

from __future__ import annotations

from dataclasses import dataclass

INI = "CANN platform file Ascend910B2C.ini"
DEVKIT = "CANN asc-devkit 0da921b"
COPIES = f"{DEVKIT}, examples/01_simd_cpp_api/05_best_practices/04_memory_access/data_copy/README_en.md"
CUBE_TABLE = f"{DEVKIT}, docs/zh/api, appendix on the theoretical rates of cube instructions, table 3"
VECTOR_TABLE = f"{DEVKIT}, docs/zh/api, appendix on the theoretical rates of vector instructions, tables 3 to 14"
PTO = "pto-isa 3186c38, include/pto/costmodel"


@dataclass(frozen=True)
class Rate:
    value: float
    unit: str
    quality: str
    source: str


RATES = {
    "clock": Rate(1.8e9, "cycles/s", "vendor", f"{INI}, cube_freq"),
    "cube cores": Rate(24, "", "vendor", f"{INI}, cube_core_cnt"),
    "vector cores": Rate(48, "", "vendor", f"{INI}, vector_core_cnt"),
    "HBM": Rate(1.49e12, "B/s", "measured", f"{COPIES}: 302 MB by 48 vector cores in 202.7 us"),
    "L2": Rate(5.2e12, "B/s", "vendor", f"{COPIES}; 4.9e12 to 6.0e12 follow from its measurements"),
    "GM to L1": Rate(110, "B/cycle", "vendor", f"{INI}, l2_read_rate"),
    "GM to UB": Rate(58.6, "B/cycle", "measured", f"{PTO}/arch_config.hpp: 100.9 GiB/s at 1.85 GHz"),
    "UB to GM": Rate(43, "B/cycle", "derived", f"{INI}, l2_write_rate 86 of a core that has two vector units"),
    "L0C to GM": Rate(40.6, "B/cycle", "measured", f"{PTO}/arch_config.hpp: 70 GiB/s at 1.85 GHz"),
    "L1 to L0A": Rate(256, "B/cycle", "vendor", CUBE_TABLE),
    "L1 to L0B": Rate(128, "B/cycle", "vendor", CUBE_TABLE),
    "fill L1": Rate(18.6, "B/cycle", "measured", f"{PTO}/arch_config.hpp: 32 GiB/s at 1.85 GHz"),
    "cube bf16": Rate(4096, "multiply-adds/cycle", "vendor", CUBE_TABLE.replace("table 3", "table 1")),
    "cube int8": Rate(8192, "multiply-adds/cycle", "vendor", CUBE_TABLE.replace("table 3", "table 1")),
    "product": Rate(6, "cycles before each", "measured", f"{PTO}/a2a3/cce_costmodel/cce_costmodel_cube.hpp"),
    "copy": Rate(20, "cycles each", "derived", f"{COPIES}: 49,152 copies of 128 B per core in 548.2 us"),
    "nd2nz row": Rate(5.2, "cycles each", "derived", f"{COPIES}: 1,536 copies of 64 rows per core in 283.5 us"),
    "read latency": Rate(208, "cycles", "derived", f"{PTO}/arch_config.hpp: 30,643 B at 247 GiB/s, fit of GM_TO_UB"),
    "write latency": Rate(104, "cycles", "derived", f"{PTO}/arch_config.hpp: 1,755 B at 28.2 GiB/s, fit of UB_TO_GM"),
    "sort": Rate(2, "keys/cycle", "vendor", VECTOR_TABLE.replace("tables 3 to 14", "table 9")),
    "scalar": Rate(1, "cycles each", "vendor", VECTOR_TABLE),
    "scalar line": Rate(
        64, "B", "vendor", f"{DEVKIT}, docs/zh/guide, scalar reads and writes: a line of the data cache"
    ),
    "flag": Rate(1, "cycles each", "measured", f"{PTO}/a2a3/cce_costmodel/cce_costmodel_sync.hpp"),
    "cross-core flag": Rate(208, "cycles", "assumed", "as long as a read of GM"),
    "launch": Rate(
        20.5e-6,
        "s",
        "vendor",
        f"{DEVKIT}, docs/zh/guide, on profiling data: 20 to 21 us before a kernel of all cores runs",
    ),
}


def rate(name: str) -> float:
    return RATES[name].value


@dataclass(frozen=True)
class Vector:
    """An instruction of the vector pipe: cycles before its first repeat of 256 bytes, per repeat, and until its result
    is there. From pto-isa 3186c38, `include/pto/costmodel/a2a3/cce_costmodel`, most of them fitted to a 910B3."""

    head: float
    slope: float
    tail: float


TWO = Vector(10, 2, 14)
VECTORS = {
    "vadd": TWO, "vsub": TWO, "vmax": TWO, "vmin": TWO, "vmul": Vector(10, 2, 15), "vdiv": Vector(11, 4, 19),
    "vand": Vector(8, 2, 12), "vor": Vector(8, 2, 12), "vnot": Vector(8, 2, 12),
    "vadds": Vector(13, 1, 18), "vmuls": Vector(11, 1, 15), "vmaxs": Vector(10, 1, 13), "vmins": Vector(14, 1, 16),
    "vabs": Vector(13, 1, 16), "vexp": Vector(13, 2, 18), "vln": Vector(13, 2, 20), "vsqrt": Vector(14, 2, 25),
    "vrelu": Vector(10, 1, 13), "vrec": Vector(10, 1, 14), "vcmp": Vector(14, 2, 22), "vcmps": Vector(14, 2, 22),
    "vsel": Vector(13, 2, 14), "vcast": Vector(14, 2, 18), "broadcast": Vector(11, 1, 13), "arange": Vector(11, 1, 13),
    "copy": Vector(11, 1, 13), "vcadd": Vector(14, 7, 32), "vreducev2": Vector(14, 14, 20),
}  # fmt: skip
