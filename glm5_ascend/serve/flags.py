"""vLLM command lines: which flags one holds, and the value each has in the end."""

from __future__ import annotations

import itertools


def given_flags(extra: list[str]) -> set[str]:
    """The flags in a vLLM command line, spelled as our defaults spell them."""
    flags = {arg.split("=", 1)[0].replace("_", "-") for arg in extra if arg.startswith("--")}
    flags |= {"--" + flag.removeprefix("--no-") for flag in flags if flag.startswith("--no-")}
    return flags | ({"--quantization"} if "-q" in extra else set())


def value_of(argv: list[str], flag: str) -> str:
    """The value a flag has in the end: the last one given."""
    value = ""
    for arg, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, inline = arg.partition("=")
        if name.replace("_", "-") == flag:
            value = inline if equals else following
    return value
