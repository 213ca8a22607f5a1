"""Stand-ins for the CANN libraries that torch_npu links against, so that `import torch_npu` works without CANN.

Every function that torch_npu needs and nobody else defines becomes one that returns 0, CANN's code for success. Only
names are read, from the wheel and from torch; nothing of CANN is copied. Needs gcc and binutils. Operators have their
real schemas afterwards, but no device: `torch.npu.is_available()` is False.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

#: The library that gets all the functions; the others only have to exist.
HOLDER = "libascendcl.so"


def make_stubs(site_packages: Path, out: Path) -> list[str]:
    """Write the stub libraries for the torch_npu in `site_packages` to `out`; returns the functions they define."""
    wheel = sorted((site_packages / "torch_npu").rglob("*.so"))
    if not wheel:
        raise RuntimeError(f"{site_packages}: no torch_npu with shared libraries; install the wheel first")
    torch = sorted((site_packages / "torch/lib").glob("*.so*"))
    own = {path.name for path in (*wheel, *torch)}
    wanted = sorted({name for library in wheel for name in needed_libraries(library)} - own)
    system = [path for name in wanted if (path := system_library(name))]
    absent = [name for name in wanted if not system_library(name)]
    if HOLDER not in absent:
        raise RuntimeError(f"torch_npu does not ask for {HOLDER}, only for {absent}: another build than expected?")
    defined = {name for library in (*wheel, *torch, *system) for name in symbols(library, "--defined-only")}
    undefined = {name for library in wheel for name in symbols(library, "--undefined-only")} - defined
    functions = sorted(name for name in undefined if not name.startswith(("Py", "_Py")))  # python itself has those
    if data := [name for name in functions if name.startswith(("_ZTV", "_ZTI", "_ZTS"))]:
        raise RuntimeError(f"torch_npu wants tables of classes, which no function can stand for: {data[:5]}")
    out.mkdir(parents=True, exist_ok=True)
    code = "".join(f"long {name}(void) {{ return 0; }}\n" for name in functions)
    for library in absent:
        build(library, code if library == HOLDER else "", out)
    return functions


def build(library: str, code: str, out: Path) -> None:
    # The names of memory functions may be among them: no opinion of the compiler about their types.
    flags = ["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{library}", "-x", "c", "-"]
    done = subprocess.run(
        ["gcc", *flags, "-o", str(out / library)], input=code, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"gcc cannot build the stub {library}:\n{done.stderr[-2000:]}")


def needed_libraries(library: Path) -> set[str]:
    """Names of the libraries that `library` is linked against."""
    lines = output("readelf", "-d", str(library)).splitlines()
    return {line.rsplit("[", 1)[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def symbols(library: Path, which: str) -> set[str]:
    """Names of its dynamic symbols, without versions and without weak references, which may stay open."""
    fields = (line.split() for line in output("nm", "-D", which, str(library)).splitlines())
    return {field[-1].split("@")[0] for field in fields if len(field) >= 2 and field[-2] != "w"}


def system_library(name: str) -> Path | None:
    """Where the linker finds `name`; None for one that this machine does not have."""
    found = output("gcc", f"-print-file-name={name}").strip()
    return Path(found) if Path(found).is_absolute() else None


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise RuntimeError(f"no program {command[0]!r}: the CANN stubs need gcc and binutils") from None
