"""Refuses a grammar or JSON schema that no text satisfies, as `{"$ref": "#/$defs/a"}` where `a` is that reference.

vLLM 0.32.0 takes it, ends the request at its first token and answers 500; a client's mistake is a 400.
`tests/serve/test_http.py` asks a server for it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from vllm import exceptions
from vllm.v1.structured_output import backend_xgrammar

_BYTES = 256
#: What becomes a 400. Not VLLMValidationError: with it the next backend would be tried, which stumbles too.
_REFUSED: type[Exception] = getattr(exceptions, "VLLMClientError", ValueError)
UNSATISFIABLE = "no text satisfies this grammar or JSON schema: is a definition only a reference to itself?"


def register() -> None:
    """Add the check behind vLLM's own, once."""
    if not hasattr(backend_xgrammar.validate_xgrammar_grammar, "glm5_ascend"):
        backend_xgrammar.validate_xgrammar_grammar = _checked(backend_xgrammar.validate_xgrammar_grammar)


def _checked(validate: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(validate)
    def both(sampling_params: Any) -> None:
        validate(sampling_params)
        asked = sampling_params.structured_outputs
        if asked is not None and not satisfiable(asked.json, asked.grammar, asked.regex):
            raise _REFUSED(UNSATISFIABLE)

    both.glm5_ascend = True  # type: ignore[attr-defined]
    return both


def satisfiable(schema: Any, grammar: str | None, regex: str | None) -> bool:
    """Whether a text can begin as the one that is given wants; milliseconds, on single bytes."""
    import xgrammar

    if schema:
        read = xgrammar.Grammar.from_json_schema(schema if isinstance(schema, str) else json.dumps(schema))
    elif grammar and not backend_xgrammar.grammar_is_likely_lark(grammar):
        read = xgrammar.Grammar.from_ebnf(grammar)
    elif regex:
        read = xgrammar.Grammar.from_regex(regex)
    else:
        return True
    matcher = xgrammar.GrammarMatcher(_compiler().compile_grammar(read))
    allowed = xgrammar.allocate_token_bitmask(1, _BYTES + 1)
    matcher.fill_next_token_bitmask(allowed, 0)
    return bool((allowed != 0).any())


@functools.cache
def _compiler() -> Any:
    """For a vocabulary of single bytes and an end."""
    import xgrammar

    tokens = [*(bytes([value]) for value in range(_BYTES)), b"<end>"]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_BYTES])
    return xgrammar.GrammarCompiler(info, cache_enabled=False)
