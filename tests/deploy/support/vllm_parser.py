"""The parser of the vLLM installed here: command lines through it, and its flags."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """A JSON file {name: argv} in sys.argv; prints name and model of each, or ends with the first that is refused."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for name, argv in json.loads(Path(sys.argv[1]).read_text()).items():
        parser.error = lambda message, name=name: sys.exit(f"{name}: {message}")
        print(name, parser.parse_args(argv[2:]).model_tag)


def write_flags() -> None:
    """Write the flags as JSON into the file in sys.argv, as the tables in deploy/flags were made."""
    from glm5_ascend.serve.engine_parser.flags import main

    main(Path(sys.argv[1]), "vllm")
