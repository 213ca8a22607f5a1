"""Checks of a running server: functions of a client that return one line of the table each. `CHECKS` lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from glm5_ascend.errors import CheckFailedError, shown
from glm5_ascend.serve import probes
from glm5_ascend.serve.asking import (
    CANARIES,
    FAILED,
    NO_THINKING,
    NO_TOOLS,
    OK,
    SKIPPED,
    WARNING,
    WEATHER,
    SmokeResult,
    ask,
    conversation,
    degenerate,
    judged,
    markup_in,
    same_prompt,
    takes_tools,
    tool_problem,
    unfinished_thought,
    user,
)
from glm5_ascend.serve.client import Client

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
#: SGLang's mean over its last steps, with --enable-metrics.
SGLANG_LENGTH = "sglang:spec_accept_length"
#: Of three draft tokens; a healthy GLM-5 W4A8 server accepts 3.16-3.19 per step (vllm-ascend #9803).
LOW_ACCEPTANCE = 2.5
#: Most tokens of the long prompt, which else fills half of the context.
LONGEST_PROMPT = 8192


def passes(results: Sequence[SmokeResult]) -> bool:
    """True if no check failed and one passed: of a server that answers nothing in time, every check is a warning."""
    statuses = {result.status for result in results}
    return FAILED not in statuses and OK in statuses


def verdict(results: Sequence[SmokeResult]) -> str:
    """One line: the number of passed checks, and the names of the others."""
    passed = sum(result.status == OK for result in results)
    parts = [f"{passed} of {len(results)} checks passed"]
    for status, word in ((FAILED, "failed"), (WARNING, "with a warning"), (SKIPPED, "skipped")):
        names = [result.check for result in results if result.status == status]
        if names:
            parts.append(f"{word}: {', '.join(names)}")
    return f"{'ok' if passes(results) else 'failed'}: {'; '.join(parts)}"


def canary(client: Client) -> SmokeResult:
    wrong, unfinished, statuses = [], [], {OK}
    for question, right in CANARIES.items():
        answer = ask(client, user(question))
        content = answer.content
        if note := unfinished_thought(answer):
            unfinished.append(f"{question} -> {note}")
            statuses.add(WARNING)
        elif (status := judged(client, question, right, content)) != OK:
            statuses.add(status)
            wrong.append(f"{question} -> {content.strip()[:60]!r}" + (" (degenerate)" if degenerate(content) else ""))
    good = len(CANARIES) - len(wrong) - len(unfinished)
    detail = f"{good} of {len(CANARIES)} right" + "".join(f"; {line}" for line in wrong + unfinished)
    worst = next(status for status in (FAILED, WARNING, OK) if status in statuses)
    return SmokeResult(worst, detail, {"right": good, "asked": len(CANARIES)})


def tool_call(client: Client, city: str = "Oslo") -> SmokeResult:
    """A tool call that the model decides to make, whole and streamed."""
    if not takes_tools(client):
        return SmokeResult(SKIPPED, NO_TOOLS)
    for stream in (False, True):
        question = user(f"What is the weather in {city}?")
        answer = ask(client, question, tools=[WEATHER], tool_choice="auto", stream=stream)
        if note := unfinished_thought(answer):
            return SmokeResult(WARNING, note)
        if problem := tool_problem(answer, city):
            return SmokeResult(FAILED, f"{'streamed' if stream else 'whole'}: {problem}")
    return SmokeResult(OK, f"get_weather(city={city!r}), whole and streamed")


def thinking(client: Client) -> SmokeResult:
    """Reasoning is separate from the answer, and absent when it is switched off."""
    question = next(iter(CANARIES))
    on, off = ask(client, user(question)), ask(client, user(question), **NO_THINKING)
    if not on.reasoning and not markup_in(on.content) and same_prompt(client, user(question), **NO_THINKING):
        return SmokeResult(SKIPPED, "the chat template has no thinking")
    if not on.reasoning:
        return SmokeResult(FAILED, "no reasoning in the answer: is --reasoning-parser glm45 set?")
    if markup_in(on.content) or markup_in(off.content):
        return SmokeResult(FAILED, f"markup in the answer: {markup_in(on.content) or markup_in(off.content)}")
    if off.reasoning:
        return SmokeResult(WARNING, "enable_thinking=false still thinks (as GLM-5.3 does)")
    return SmokeResult(OK, f"{len(on.reasoning)} characters of reasoning, none when switched off")


def streaming(client: Client) -> SmokeResult:
    question, right = next(iter(CANARIES.items()))
    answer = ask(client, user(question), stream=True)
    if answer.chunks > 1 and (note := unfinished_thought(answer)):
        return SmokeResult(WARNING, f"{answer.chunks} pieces, {note}")
    whole = answer.chunks > 1 and answer.finish == "stop" and answer.completion_tokens > 0
    status = judged(client, question, right, answer.content) if whole else FAILED
    detail = f"{answer.chunks} pieces, {answer.completion_tokens} tokens, finish_reason {shown(answer.finish)}"
    return SmokeResult(status, detail if status == OK else f"{detail}, text {answer.content[:60]!r}")


def long_prompt(client: Client) -> SmokeResult:
    """A long conversation of sums, then one more. Beyond 2048 tokens the indexer selects positions."""
    context = client.entry().get("max_model_len") or 2 * LONGEST_PROMPT
    longest = min(LONGEST_PROMPT, context // 2)
    turns = conversation(48)
    per_turn = client.chat(turns, max_tokens=1).prompt_tokens / len(turns)
    if per_turn < 1:
        return SmokeResult(FAILED, f"usage counts {per_turn * len(turns):.0f} tokens in {len(turns)} turns")
    turns = conversation(int(longest / per_turn) // 2 * 2 + 2)
    question, right = next(iter(CANARIES.items()))
    answer = ask(client, [*turns, *user(question)], **NO_THINKING)
    values = {"prompt_tokens": answer.prompt_tokens, "right": right in answer.content}
    detail = f"{answer.prompt_tokens} tokens, answer {answer.content.strip()[:40]!r}"
    if note := unfinished_thought(answer):
        return SmokeResult(WARNING, f"{answer.prompt_tokens} tokens, {note}", values)
    if degenerate(answer.content) or answer.prompt_tokens < longest:
        return SmokeResult(FAILED, detail, values)
    return SmokeResult(OK if values["right"] else WARNING, detail, values)


def acceptance(client: Client, before: Mapping[str, float]) -> SmokeResult:
    """Tokens per step with MTP, over the earlier checks. before: the metrics before them."""
    after = client.metrics()
    steps, accepted = (int(after.get(name, 0) - before.get(name, 0)) for name in (DRAFTS, ACCEPTED))
    mean = after.get(SGLANG_LENGTH) or (1 + accepted / steps if steps > 0 else 0)
    if not mean:
        return SmokeResult(SKIPPED, "/metrics counts no drafts: the server runs without MTP")
    values = {"tokens_per_step": round(mean, 3), **({"steps": steps} if steps else {})}
    detail = f"{mean:.2f} tokens per step over {f'{steps} steps' if steps else 'its last steps'}"
    return SmokeResult(OK if mean >= LOW_ACCEPTANCE else WARNING, detail, values)


#: Name of a check, and the function.
CHECKS = {
    "canary answers": canary, "tool call": tool_call, "thinking": thinking, "streaming": streaming,
    "long prompt": long_prompt, **probes.PROBES,
}  # fmt: skip


def run(client: Client) -> list[SmokeResult]:
    """Run all checks, on the server's first model if the client names none.

    A check that the server answers with an error fails, and the others still run.
    """
    client = client.named()
    before, results = client.metrics(), []
    for name, check in CHECKS.items():
        try:
            result = check(client)
        except CheckFailedError as error:
            result = SmokeResult(FAILED, error.message)
        results.append(replace(result, check=name))
    return [*results, replace(acceptance(client, before), check="MTP acceptance")]
