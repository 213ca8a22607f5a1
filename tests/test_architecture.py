"""Import rules of the project, read from the source of every file."""

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
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for path, module in SOURCES.items()}

#: Packages from the bottom to the top: a package imports only packages that stand before it.
LAYERS = (
    "errors",
    "stop_signals",
    "options",
    "engine_lines",
    "engine_view",
    "glm5_kernels",
    "files",
    "report",
    "model",
    "checkpoint",
    "verify",
    "quantize",
    "serve",
    "demo_model",
    "fidelity",
    "plan",
    "deploy",
    "cli",
    "__main__",
)
#: Imports that the order allows and that are still wrong: (importer, imported).
FORBIDDEN = {("quantize", "verify"), ("fidelity", "demo_model")}
#: Runs in the interpreter of another environment, which has these packages; nothing here imports it.
REHEARSED = "glm5_ascend.deploy.rehearsal.inside."
#: Heavy packages and who may import them: a module, or everything below a name that ends with a dot.
THIRD_PARTY = {
    "vllm": ("glm5_ascend.serve.", REHEARSED),
    "transformers": ("glm5_ascend.checkpoint.tokenizer", "glm5_ascend.serve."),
    "openai": ("glm5_ascend.cli.demo",),
    "torch_npu": ("glm5_ascend.model.device", "glm5_ascend.serve.plugin.ascend.", REHEARSED),
    "vllm_ascend": ("glm5_ascend.serve.plugin.ascend.", REHEARSED),
}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_of(module: str, path: Path, late: bool = True, types: bool = True) -> set[str]:
    """Absolute names of everything a file imports; `late`: also inside functions; `types`: also for annotations."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    body = [node for node in TREES[module].body if types or not is_for_types(node)]
    nodes = ast.Module(body if late else [node for node in body if not isinstance(node, ast.FunctionDef)], [])
    names = set()
    for node in ast.walk(nodes):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in MODULES else base)
    return names


EDGES = {module: imports_of(module, path) for path, module in SOURCES.items()}


def package_of(module: str) -> str:
    """The package directly below glm5_ascend, or glm5_kernels."""
    top, *rest = module.split(".")
    return top if top == "glm5_kernels" or not rest else rest[0]


def test_packages_import_only_what_stands_below_them() -> None:
    for module, names in EDGES.items():
        imports = {package_of(name) for name in names if name.startswith(("glm5_ascend.", "glm5_kernels"))}
        if module == "glm5_ascend":
            assert not imports
            continue
        package = package_of(module)
        for below in imports - {package}:
            assert LAYERS.index(below) < LAYERS.index(package), f"{module} imports {below}"
            assert (package, below) not in FORBIDDEN, f"{module} imports {below}"


def test_there_is_no_import_cycle() -> None:
    """Nor one of annotations, inside a package either."""
    graph = {module: {name for name in names if name in MODULES and name != module} for module, names in EDGES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_no_module_is_imported_by_the_package_that_it_imports() -> None:
    """`from package import module` reads the package's `__init__` first, and everything that it imports."""
    files = {module: path for path, module in SOURCES.items()}
    for module, tree in TREES.items():
        parts = (ast.walk(part) for part in tree.body if not is_for_types(part))
        nodes = (node for part in parts for node in part if isinstance(node, ast.ImportFrom))
        for package in {node.module for node in nodes if node.module in MODULES} - {module}:
            assert module not in imports_of(package, files[package], late=False, types=False), f"{package} and {module}"


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_heavy_packages_are_imported_by_few(package: str) -> None:
    for module, names in EDGES.items():
        if any(name.split(".")[0] == package for name in names):
            allowed = THIRD_PARTY[package]
            assert any(module.startswith(name) if name.endswith(".") else module == name for name in allowed), module


def test_other_packages_import_ops_and_registry_of_the_kernels() -> None:
    """`registry` where torch must not load, `ops` everywhere else."""
    names = {name for module, names in EDGES.items() if package_of(module) != "glm5_kernels" for name in names}
    assert {name for name in names if name.startswith("glm5_kernels")} <= {"glm5_kernels.ops", "glm5_kernels.registry"}


def test_what_runs_in_another_environment_stands_alone() -> None:
    for module, names in EDGES.items():
        for name in names:
            if name.startswith(("glm5_ascend.", "glm5_kernels")):
                assert f"{name}.".startswith(REHEARSED) == f"{module}.".startswith(REHEARSED), f"{module}: {name}"


#: Who may parse a file or a text, besides the readers of foreign files: their input is our own.
PARSERS = {
    "glm5_ascend.files": "the readers of foreign files",
    "glm5_ascend.quantize.run.journal": "a line counts only if it is, byte for byte, what we write",
    "glm5_ascend.quantize.run.whole_model": "tensors of the first rank, weights only",
    "glm5_ascend.deploy.rehearsal.inside.rank": "the job that the command has written",
}
_PARSE = {
    "json.load", "json.loads", "yaml.load", "yaml.load_all", "yaml.safe_load", "yaml.safe_load_all", "yaml.full_load",
    "yaml.unsafe_load", "yaml.compose", "yaml.parse", "yaml.scan", "pickle.load", "pickle.loads", "torch.load",
    "safe_open", "load_file", "tomllib.load", "tomllib.loads",
}  # fmt: skip


def test_foreign_files_are_parsed_by_the_bounded_readers_only() -> None:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) in _PARSE:
                assert any(module == name or module.startswith(f"{name}.") for name in PARSERS), f"{module} parses"
            if isinstance(node.func, ast.Attribute):
                assert node.func.attr != "json" or node.args, f"{module}:{node.lineno} parses an HTTP answer itself"


def test_files_are_short() -> None:
    for path in SOURCES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300, path


def test_no_loader_runs_the_code_of_a_checkpoint() -> None:
    """Without the flag the library asks on standard input, and a `y` there runs what the checkpoint brings."""
    folders = ("glm5_ascend", "kernels", "benchmarks", "tests")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                flags = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
                assert [getattr(flag, "value", None) for flag in flags] == [False], f"{path}:{node.lineno}"
