"""Stand-ins for the CANN libraries that torch_npu links against, so that `import torch_npu` works without CANN.

Every function that torch_npu needs and that no other library defines becomes a stub that returns 0, CANN's code for
success. Only names are read, from the wheel and from torch; nothing of CANN is copied. Needs gcc and binutils. The
operators have their real schemas, but there is no device: `torch.npu.is_available()` is False.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from glm5_ascend.errors import MissingEnvironmentError, shortened

_FIX = "install gcc and binutils, then prepare again"
#: The library that defines all stubs; the other libraries only have to exist.
STUB_LIBRARY = "libascendcl.so"


def make_stubs(site_packages: Path, out: Path) -> None:
    """Write the stub libraries for the torch_npu in `site_packages` to `out`."""
    wheel = sorted((site_packages / "torch_npu").rglob("*.so"))
    torch = sorted((site_packages / "torch/lib").glob("*.so*"))
    present = {path.name for path in (*wheel, *torch)}
    needed = sorted({name for library in wheel for name in needed_libraries(library)} - present)
    libraries = {name: system_library(name) for name in needed}
    system = (path for path in libraries.values() if path)
    defined = {name for library in (*wheel, *torch, *system) for name in symbols(library, "--defined-only")}
    undefined = {name for library in wheel for name in symbols(library, "--undefined-only")} - defined
    functions = sorted(name for name in undefined if not name.startswith(("Py", "_Py")))  # defined by Python
    out.mkdir(parents=True, exist_ok=True)
    code = "".join(f"long {name}(void) {{ return 0; }}\n" for name in functions)
    for library in (name for name, path in libraries.items() if path is None):
        build(library, code if library == STUB_LIBRARY else "", out)


def build(library: str, code: str, out: Path) -> None:
    # Names of builtin functions may be among them; the compiler must not check their types.
    flags = ["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{library}", "-x", "c", "-"]
    done = subprocess.run(
        ["gcc", *flags, "-o", str(out / library)], input=code, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise MissingEnvironmentError(f"gcc cannot build the stub {library}: {shortened(done.stderr, 300)}", _FIX)


def needed_libraries(library: Path) -> set[str]:
    """Names of the libraries that `library` is linked against."""
    lines = output("readelf", "-d", str(library)).splitlines()
    return {line.rsplit("[", 1)[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def symbols(library: Path, which: str) -> set[str]:
    """Names of dynamic symbols without versions. Weak references are left out: they need no definition."""
    fields = (line.split() for line in output("nm", "-D", which, str(library)).splitlines())
    return {field[-1].split("@")[0] for field in fields if len(field) >= 2 and field[-2] != "w"}


def system_library(name: str) -> Path | None:
    """Path of a library of this machine; None if the linker does not find it."""
    path = Path(output("gcc", f"-print-file-name={name}").strip())
    return path if path.is_absolute() else None


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise MissingEnvironmentError(f"no program {command[0]!r}: stubs need gcc and binutils", _FIX) from None
