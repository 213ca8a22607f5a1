"""Write the flags of this environment's engine as JSON: `python -m glm5_rehearsal.flags OUT vllm|sglang`.

{"engine": name and version, "flags": {flag without dashes: type}, "aliases": {other spelling: flag}}, where types are
those of `glm5_ascend.serve.flag_table`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin


def main() -> None:
    """Build the engine's parser as its server does and write its flags to a file."""
    out, engine = sys.argv[1:]
    if importlib.util.find_spec("torch_npu") is not None:
        from . import machine

        machine.prepare()
    Path(out).write_text(json.dumps(sglang_flags() if engine == "sglang" else vllm_flags()))


def cli_args() -> Any:
    """vLLM's module with the flags of `vllm serve`."""
    try:
        from vllm.entrypoints.launchers import cli_args
    except ImportError:  # 0.23
        from vllm.entrypoints.openai import cli_args
    return cli_args


def vllm_flags() -> dict[str, Any]:
    """Flags of `vllm serve`, with what vllm-ascend adds to them."""
    from vllm.engine import arg_utils
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = cli_args().make_arg_parser(FlexibleArgumentParser())
    current_platform.pre_register_and_update(parser)
    fields: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(arg_utils.EngineArgs)}
    fields["speculative_config"] = arg_utils.SpeculativeConfig
    with suppress(ImportError):
        from vllm_ascend.ascend_config import AscendConfig

        if hasattr(AscendConfig, "__pydantic_fields__"):
            fields["additional_config"] = AscendConfig
    return {"engine": f"vLLM {arg_utils.VLLM_VERSION.split('+')[0]}", **flags_of(parser, fields)}


def sglang_flags() -> dict[str, Any]:
    """Flags of `python -m sglang.launch_server`, whose parser takes no underscores."""
    from importlib.metadata import version

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {"engine": f"SGLang {version('sglang')}", **flags_of(parser, {}), "underscores": False}


def flags_of(parser: argparse.ArgumentParser, fields: dict[str, Any]) -> dict[str, Any]:
    """Types of a parser's flags, and their other spellings. fields: annotation of the fields that flags set."""
    flags: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if not name.startswith("--no-")]
        long = [name.removeprefix("--") for name in names if name.startswith("--")]
        if long and action.dest != "help":
            flags[long[0]] = type_of(action, fields.get(action.dest))
            aliases |= {name: long[0] for name in names if name != f"--{long[0]}"}
    return {"flags": flags, "aliases": aliases}


def type_of(action: argparse.Action, hint: Any) -> Any:
    """Type of a flag, by what its parser takes."""
    keys = keys_of(hint)
    if keys:
        return keys
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if isinstance(action, argparse._AppendAction):
        return "append"
    if action.nargs == 0:
        return "switch"
    if action.nargs == "?":
        return "optional"
    if action.choices and action.nargs is None:
        return [choice for choice in action.choices if choice is not None]
    if action.nargs is not None:
        return "list"
    words = {'{"a": 1}': "json", "1.5": "float", "auto": "human or auto", "16k": "human", "7": "int"}
    takes = {text for text in (*words, "x", "{x}") if _takes(action, text)}
    if "x" in takes:
        return "str" if "{x}" in takes else "json or str"
    return next((word for text, word in words.items() if text in takes), "str")


def _takes(action: argparse.Action, text: str) -> bool:
    try:
        value = action.type(text) if callable(action.type) else text
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        return False
    return text != "7" or isinstance(value, int)


def keys_of(hint: Any, seen: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Keys of a dataclass, or of the one in a union, with the keys below each or None; empty for all other types."""
    for choice in get_args(hint) or (hint,):
        if dataclasses.is_dataclass(choice) and isinstance(choice, type) and choice not in seen:
            resolved = getattr(choice, "__pydantic_fields__", {})
            return {
                field.name: keys_below(
                    resolved[field.name].annotation if field.name in resolved else field.type, (*seen, choice)
                )
                for field in dataclasses.fields(choice)
                if field.init and not field.name.startswith("_")
            }
    return {}


def keys_below(hint: Any, seen: tuple[Any, ...]) -> dict[str, Any] | None:
    """Keys of a key's own object, by the annotation of its field; None where it may be something else."""
    origin = get_origin(hint)
    if origin is Annotated:
        return keys_below(get_args(hint)[0], seen)
    if origin in (Union, UnionType):
        first, *rest = [keys_below(choice, seen) for choice in get_args(hint) if choice is not NoneType]
        return first if all(other == first for other in rest) else None
    return keys_of(hint, seen) or None


if __name__ == "__main__":
    main()
