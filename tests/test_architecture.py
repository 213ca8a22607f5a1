"""The import rules of the house, read from the source of every file."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

from tests.support.command import ROOT

SOURCES = {
    path: path.relative_to(base).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for base, package in ((ROOT, "glm5_ascend"), (ROOT / "kernels", "glm5_kernels"))
    for path in (base / package).rglob("*.py")
}
MODULES = set(SOURCES.values())

#: Who imports whom inside glm5_ascend, exactly: an edge that is not here is new, one that is gone goes here, too.
EDGES_BETWEEN_PACKAGES = {
    "errors": set(),
    "files": {"errors"},
    "glm5_kernels": set(),
    "report": {"errors", "files"},
    "model": {"errors", "files", "glm5_kernels"},
    "demo_model": {"errors", "files", "model"},
    "checkpoint": {"errors", "files", "model"},
    "verify": {"checkpoint", "errors", "model"},
    "quantize": {"checkpoint", "errors", "files", "glm5_kernels", "model", "verify"},
    "serve": {"checkpoint", "errors", "files", "glm5_kernels", "model"},
    "deploy": {"checkpoint", "errors", "files", "glm5_kernels", "model", "serve", "verify"},
    "fidelity": {"checkpoint", "demo_model", "errors", "glm5_kernels", "model", "quantize", "report", "serve"},
    "plan": {"checkpoint", "deploy", "errors", "files", "glm5_kernels", "model", "report", "serve"},
    "cli": {
        "demo_model",
        "deploy",
        "errors",
        "fidelity",
        "glm5_kernels",
        "model",
        "plan",
        "quantize",
        "report",
        "serve",
        "verify",
    },
    "__main__": {"cli"},
}
#: Run by the interpreter of another environment, which holds these packages; nothing here imports it.
INSIDE_OTHERS = ("glm5_ascend.deploy.rehearsal.inside.",)
#: Heavy packages and the only places that may import them: modules, or all below a name with a dot at its end.
THIRD_PARTY = {
    "vllm": ("glm5_ascend.serve.", *INSIDE_OTHERS),
    "transformers": ("glm5_ascend.demo_model.", "glm5_ascend.checkpoint.tokenizer_child", "glm5_ascend.serve."),
    "openai": ("glm5_ascend.cli.demo",),
    "torch_npu": ("glm5_ascend.model.device", "glm5_ascend.serve.plugin.ascend.", *INSIDE_OTHERS),
    "vllm_ascend": ("glm5_ascend.serve.plugin.ascend.", *INSIDE_OTHERS),
}


def imported(path: Path, module: str, late: bool = True) -> set[str]:
    """Absolute names of everything a file imports; `late`: function bodies included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not late:
        tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return found


EDGES = {module: imported(path, module) for path, module in SOURCES.items()}


def room(module: str) -> str:
    """The part of the house a module belongs to."""
    top, *rest = module.split(".")
    return top if top == "glm5_kernels" or not rest else rest[0]


def test_packages_import_exactly_these_packages() -> None:
    found: dict[str, set[str]] = {room(module): set() for module in MODULES if module != "glm5_ascend"}
    for module, names in EDGES.items():
        ours = {room(name) for name in names if name.startswith(("glm5_ascend.", "glm5_kernels"))}
        if module == "glm5_ascend":
            assert not ours
        else:
            found[room(module)] |= ours - {room(module)}
    assert found == EDGES_BETWEEN_PACKAGES


def test_packages_point_down() -> None:
    list(graphlib.TopologicalSorter(EDGES_BETWEEN_PACKAGES).static_order())


def test_there_is_no_import_cycle() -> None:
    graph = {module: {name for name in names if name in MODULES and name != module} for module, names in EDGES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_no_two_modules_import_each_other() -> None:
    """A package's own file counts: `from package import module` reads its `__init__` first, and what that reads."""
    for path, module in SOURCES.items():
        for package in packages_named(path) - {module}:
            home = next(file for file, name in SOURCES.items() if name == package)
            assert module not in imported(home, package, late=False), f"{package} and {module}"


def packages_named(path: Path) -> set[str]:
    """The packages of ours that a file imports something from, by their own name."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module in MODULES}


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_heavy_packages_stay_in_their_places(package: str) -> None:
    for module, names in EDGES.items():
        if any(name.split(".")[0] == package for name in names):
            places = THIRD_PARTY[package]
            allowed = any(module.startswith(place) if place.endswith(".") else module == place for place in places)
            assert allowed, f"{module} imports {package}"


def test_the_doors_to_the_kernels_are_ops_and_registry() -> None:
    """`ops`, and `registry` where torch must not load: exactly these two are used."""
    opened = {name for module, names in EDGES.items() if room(module) != "glm5_kernels" for name in names}
    doors = {name for name in opened if name.split(".")[0] == "glm5_kernels"}
    assert doors == {"glm5_kernels.ops", "glm5_kernels.registry"}


def test_what_runs_in_another_environment_stands_alone() -> None:
    inside = "glm5_ascend.deploy.rehearsal.inside"
    for module, names in EDGES.items():
        for name in names:
            if name.startswith(("glm5_ascend.", "glm5_kernels")):
                assert name.startswith(inside) == module.startswith(inside), f"{module} imports {name}"


def test_one_op_folder_does_not_import_another() -> None:
    folders = {path.parent.name for path in (ROOT / "kernels" / "glm5_kernels").glob("*/__init__.py")} - {
        "compiled",
        "parity",
    }
    for module, names in EDGES.items():
        if room(module) == "glm5_kernels" and len(module.split(".")) > 1:
            others = {name.split(".")[1] for name in names if name.startswith("glm5_kernels.")} & folders
            if module != "glm5_kernels.ops" and not module.startswith("glm5_kernels.parity"):  # the door, the suite
                assert others <= {module.split(".")[1]}, f"{module} imports {others}"


#: Who may parse: the three readers of foreign files, and those whose text is our own (its child's, its own file's).
PARSERS = {
    "glm5_ascend.model.json_file": {"json.loads"},
    "glm5_ascend.files.yaml_file": {"yaml.parse"},
    "glm5_ascend.quantize.run.journal": {"json.loads"},  # a line counts only if it is, byte for byte, what we write
    "glm5_ascend.deploy.acceptance.journal": {"json.loads"},  # the same
    "glm5_ascend.quantize.run.helper_rank": {"torch.load"},  # of the first rank, weights only
    "glm5_ascend.demo_model.loading": {"load_file"},  # the checkpoint that the same run has written
    "glm5_ascend.checkpoint.tokenizer_child": {"json.loads"},  # requests of the process that has started it
    "glm5_ascend.deploy.rehearsal.inside.rank": {"json.loads"},  # the job that the command has written
    "glm5_ascend.cli.demo": {"json.loads"},  # a tool call of the server that the demo has started
}
_PARSE = {
    "json.load", "json.loads", "yaml.load", "yaml.load_all", "yaml.safe_load", "yaml.safe_load_all", "yaml.full_load",
    "yaml.unsafe_load", "yaml.compose", "yaml.parse", "yaml.scan", "pickle.load", "pickle.loads", "torch.load",
    "safe_open", "load_file", "tomllib.load", "tomllib.loads",
}  # fmt: skip


def test_foreign_files_are_parsed_by_three_readers() -> None:
    found: dict[str, set[str]] = {}
    for path, module in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _PARSE:
                found.setdefault(module, set()).add(ast.unparse(node.func))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr != "json" or node.args, f"{module}:{node.lineno} parses an answer itself"
    assert found == PARSERS


def test_files_stay_readable() -> None:
    for path in SOURCES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300, path


def test_no_class_name_has_two_meanings() -> None:
    homes: dict[str, list[str]] = {}
    for path, module in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_loader_runs_the_code_of_a_checkpoint() -> None:
    """Without the flag the library asks on standard input, and a `y` there runs what the checkpoint brings."""
    calls = 0
    for path in (
        path for folder in ("glm5_ascend", "kernels", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                calls += 1
                flags = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
                assert [getattr(flag, "value", None) for flag in flags] == [False], f"{path}:{node.lineno}"
    assert calls >= 9
