"""The parser of the vLLM installed here takes every profile's flags; vLLM 0.23.0's is asked by a contract test."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from glm5_ascend.deploy.profiles.command import ServerPlace, command
from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.engine_lines import VLLM

pytest.importorskip("vllm")
#: vLLM 0.32 parses in a process of its own: importing it changes torch and logging for all tests.
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for name, argv in json.load(sys.stdin).items():
    parser.error = lambda message: sys.exit(f"{name}: {message}")
    print(name, parser.parse_args(argv[2:]).model_tag)
"""


def test_every_flag_is_taken() -> None:
    commands = {}
    for profile in (item for item in map(load, names()) if item.engine == VLLM):  # SGLang's: a contract test
        for role in profile.roles.values():
            server = ServerPlace(role.nodes - 1, 0, "127.0.0.1", "127.0.0.1", "lo")
            commands[f"{profile.name}/{role.name}"] = command(profile, role, server, "DIR", []).argv
        for key, switch in profile.scheduling.items():
            if switch.add:
                commands[f"{profile.name}+{key}"] = ["vllm", "serve", "DIR", *switch.add]
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(commands), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.split("\n")[:-1]) == sorted(f"{name} DIR" for name in commands)
