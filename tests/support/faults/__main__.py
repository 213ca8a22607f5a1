"""Plants each fault of `FAULTS` in a copy of the repository and prints which test finds it.

    python -m tests.support.faults                   # this tree
    python -m tests.support.faults --tree DIR        # another one, e.g. a worktree of an older commit
    python -m tests.support.faults --only verify     # areas or words of the description; --list shows where each stands

A fault is found by its code and a test by its function's name, so that both may move to another file. The named tests
are run once without any fault: what fails there proves nothing. Exits with 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.support.faults import FAULTS
from tests.support.faults.fault import Fault

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("glm5_ascend", "kernels", "deploy/templates")
SOURCES = (".py", ".h", ".cpp", ".j2")
#: What a copy does without. The library of the kernels is copied, and built again where their source has changed.
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "work", "build", "*.pyc", ".mypy_cache", ".ruff_cache", ".pytest_cache"
)
EVERY_LEVEL = ("-m", "not contract")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class MissingError(Exception):
    """Code or a test that the table names is no longer there."""


def find_code(tree: Path, fault: Fault) -> Path:
    """The file that the fault goes into.

    Raises:
        MissingError: it does not stand exactly once in the product.
    """
    texts = {
        path: path.read_text(encoding="utf-8")
        for name in PRODUCT
        for path in (tree / name).rglob("*.*")
        if path.suffix in SOURCES
    }
    counts = {path: text.count(fault.right) for path, text in texts.items() if fault.right in text}
    if sum(counts.values()) != 1:
        raise MissingError("its code is no longer there, or more than once")
    return next(iter(counts))


def find_tests(tree: Path, names: Iterable[str]) -> list[str]:
    """Node ids of test functions given by name.

    Raises:
        MissingError: none of them exists.
    """
    files = {path: path.read_text(encoding="utf-8") for path in sorted((tree / "tests").rglob("test_*.py"))}
    found = []
    for name in names:
        function = name.partition("[")[0]
        where = [path for path, text in files.items() if re.search(rf"^def {function}\(", text, re.MULTILINE)]
        found += [f"{path.relative_to(tree).as_posix()}::{name}" for path in where]
    if not found:
        raise MissingError("its tests are no longer there")
    return found


def pytest(tree: Path, *arguments: str) -> str:
    """Output of a run of `tree`'s tests on its own code."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest {' '.join(arguments)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def failing(tree: Path, tests: list[str], first: bool = True) -> list[str]:
    return FAILED.findall(pytest(tree, *EVERY_LEVEL, *(["-x"] if first else []), *tests))


def build(tree: Path, source: Path) -> None:
    """Build the library of the kernels after a change of `source`, if that is C++."""
    if source.suffix in (".h", ".cpp"):
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=tree, capture_output=True, check=True)


def finding(tree: Path, path: Path, fault: Fault, tests: list[str]) -> list[str]:
    """The tests that fail with the fault; the file is put back."""
    before = path.read_text(encoding="utf-8")
    try:
        path.write_text(before.replace(fault.right, fault.wrong), encoding="utf-8")
        build(tree, path)
        return failing(tree, tests)
    finally:
        path.write_text(before, encoding="utf-8")
        build(tree, path)


def collected(tree: Path, tests: Iterable[str], *options: str) -> set[str]:
    """All ids in the files of `tests`."""
    files = sorted({test.partition("::")[0] for test in tests})
    return set(pytest(tree, "--collect-only", *options, *files).splitlines()) if files else set()


def present(tests: Iterable[str], ids: set[str]) -> list[str]:
    """`tests`, without the parameters that a tree does not have: then all cases of the function."""
    return [test if "[" not in test or test in ids else test.partition("[")[0] for test in tests]


def chosen(words: list[str]) -> list[Fault]:
    return [fault for fault in FAULTS if not words or fault.area in words or any(word in fault.what for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    faults, lost = chosen(args.only), {}
    places: dict[Fault, tuple[Path, list[str]]] = {}
    for fault in faults:
        try:
            places[fault] = find_code(args.tree, fault).relative_to(args.tree), find_tests(args.tree, fault.tests)
        except MissingError as error:
            lost[fault] = str(error)
    if args.list:
        for fault in faults:
            print(f"{fault.area:9} {fault.what}: {lost.get(fault) or places[fault]}")
        return bool(lost)
    found: dict[Fault, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(args.tree, Path(folder) / "copy", symlinks=True, ignore=IGNORED))
        ids = collected(copy, (test for _, named in places.values() for test in named), *EVERY_LEVEL)
        places = {fault: (path, present(named, ids)) for fault, (path, named) in places.items()}
        tests = sorted({test for _, named in places.values() for test in named})
        broken = failing(copy, tests, first=False)
        for number, (fault, (_, named)) in enumerate(places.items(), 1):
            usable = [test for test in named if not any(wrong.startswith(test) for wrong in broken)]
            found[fault] = finding(copy, copy / places[fault][0], fault, usable) if usable else []
            print(f"{number}/{len(places)} {fault.what}: {found[fault] or 'NOT FOUND'}", file=sys.stderr, flush=True)
        quick = collected(copy, (tests[0] for tests in found.values() if tests))  # the others: make test-all
    print("| | fault | in | found by | level |\n|---|---|---|---|---|", end="\n")
    for number, fault in enumerate(faults, 1):
        tests = found.get(fault) or []
        by = f"`{tests[0].rpartition('::')[2]}`" if tests else f"**{lost.get(fault) or 'NOT FOUND'}**"
        where = f"`{places[fault][0].as_posix()}`" if fault in places else ""
        level = ("make test" if tests[0] in quick else "make test-all") if tests else ""
        print(f"| {number} | {fault.area}: {fault.what} | {where} | {by} | {level} |")
    if broken:
        print(f"fail without any fault, not used: {', '.join(broken)}")
    return bool(lost) or not all(found.values())


if __name__ == "__main__":
    sys.exit(main())
