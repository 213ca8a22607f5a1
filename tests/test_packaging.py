"""What is installed, what it imports, and that nothing shadows Hugging Face's package `kernels`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from glm5_ascend.engine_lines import LINES, STABLE, EngineLine
from tests.support.command import ROOT, ran, said

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_kernels_is_a_source_root_not_a_package() -> None:
    for folder in ("kernels", "quant_recipes", "deploy"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


def test_kernels_cannot_be_imported_twice() -> None:
    done = ran(sys.executable, "-c", "import kernels.glm5_kernels", env=os.environ, cwd=ROOT)
    assert done.returncode != 0
    assert "import glm5_kernels" in done.stderr or "No module named" in done.stderr


@pytest.mark.parametrize("arguments", [["-c", "import glm5_ascend"], ["-m", "glm5_ascend", "--help"]])
def test_import_and_help_stay_light(arguments: list[str]) -> None:
    """Neither may pull in torch, vllm or transformers (each costs seconds)."""
    done = ran(sys.executable, "-X", "importtime", *arguments, env=os.environ, cwd=ROOT, check=True)
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "glm5_ascend" in loaded
    assert not loaded & {"torch", "vllm", "transformers", "numpy", "pydantic"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel built from the sdist, as a release would be."""
    out = tmp_path_factory.mktemp("dist")
    said(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, env=os.environ)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_wheel_holds_code_and_data(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tops = {name.split("/")[0] for name in names}
    version = PYPROJECT["project"]["version"]
    assert tops == {"glm5_ascend", "glm5_kernels", f"glm5_ascend-{version}.dist-info"}
    for folder in ("quant_recipes", "deploy"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file():
                assert f"glm5_ascend/data/{path.relative_to(ROOT).as_posix()}" in names
    for folder in ("data", "flash"):
        for path in (ROOT / "glm5_ascend" / "demo_model" / folder).iterdir():
            assert f"glm5_ascend/demo_model/{folder}/{path.name}" in names
    assert "glm5_ascend/quantize/data/calibration.jsonl" in names
    for path in (ROOT / "glm5_ascend" / "report" / "templates").iterdir():
        assert f"glm5_ascend/report/templates/{path.name}" in names
    assert {"glm5_ascend/py.typed", "glm5_kernels/py.typed"} <= names


def test_the_library_needs_no_newer_system_than_its_wheels_say() -> None:
    """manylinux_2_28 of `make wheels`: versions of symbols of glibc, and of the libstdc++ that torch has loaded."""
    tag = re.search(r"manylinux_2_(\d+)_x86_64", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert tag is not None
    library = (ROOT / "kernels" / "glm5_kernels" / "libglm5_kernels.so").read_bytes()
    for name, newest in ((rb"GLIBC_2\.", int(tag[1])), (rb"GLIBCXX_3\.4\.", 24), (rb"CXXABI_1\.3\.", 11)):
        assert max((int(version) for version in re.findall(name + rb"(\d+)", library)), default=0) <= newest, name


#: Which torch SGLang's image has is not published: nothing to plan with. Our Dockerfile installs with --no-deps there.
WITH_TORCH = [
    pytest.param(line, id=line.name, marks=[] if line is STABLE else [pytest.mark.long])
    for line in LINES.values()
    if "torch" in line.packages
]


@pytest.mark.parametrize("line", WITH_TORCH)
def test_npu_extra_changes_none_of_the_atlas_set(line: EngineLine, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """pip's own resolver, in an environment where the image's packages are present, plans to touch none of them.

    The packages are stood in for by their metadata (name and version): that is all the resolver looks at.
    """
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    for name, version in line.packages.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("image\n")
        (info / "RECORD").write_text("")
    report = tmp_path / "report.json"
    python = tmp_path / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--quiet"]
    # PYTHONPATH would show pip this checkout's own metadata: installed already, nothing to plan.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said(*command, "--report", report, f"{wheel.filename}[npu]", env=environ)
    planned = {item["metadata"]["name"].lower().replace("_", "-") for item in json.loads(report.read_text())["install"]}
    assert "glm5-ascend" in planned
    assert not planned & set(line.packages)
    assert not {name for name in planned if name.startswith("nvidia-")}
