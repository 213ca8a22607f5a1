"""Functions of vLLM that moved between its versions."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

#: Function -> modules that define it, newest first: 0.33, 0.30 to 0.32, older.
MODULES = {
    "make_arg_parser": (
        "vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args",
    ),
    "get_kv_cache_configs": ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"),
}  # fmt: skip


def module_of(function: str) -> ModuleType:
    """The module that defines a function in this version. Raises `ImportError` if none does."""
    for name in MODULES[function]:
        with suppress(ImportError):
            module = import_module(name)
            if hasattr(module, function):
                return module
    raise ImportError(f"this vLLM has no {function} in {' or '.join(MODULES[function])}")


def moved(function: str) -> Any:
    """The function itself."""
    return getattr(module_of(function), function)
