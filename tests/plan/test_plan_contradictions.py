"""Answers that contradict themselves or each other, looked for in random questions."""

from __future__ import annotations

import itertools
import json
import math
import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from glm5_ascend.deploy.planning.commands import with_commands
from glm5_ascend.deploy.planning.roles import lines
from glm5_ascend.plan import plan
from glm5_ascend.plan.api import Plan
from glm5_ascend.plan.layout import parse_layout
from glm5_ascend.plan.report import show
from glm5_ascend.plan.search import EQUAL, MEETS, MISSES, SHEDS
from tests.plan.support.questions import answered

OUTPUTS = ("output_tokens_per_s", "tpot_ms", "ttft_ms")
Answers = list[tuple[dict[str, Any], Plan]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    return answered()


def test_no_figure_is_impossible(answers: Answers) -> None:
    """Ranges in order, memory for a cache, no step faster than reading the weights that every step reads."""
    for question, answer in answers:
        numbers, prediction = answer.numbers, answer.best.prediction
        assert all(0 <= number.low <= number.value <= number.high for number in numbers.values()), question
        assert prediction.memory.budgets["high"] > 0
        always = sum(prediction.memory.weights[name] for name in ("attention", "dense MLP and router"))
        bound = always / answer.question.hardware.rates.memory
        assert answer.step.seconds > bound and prediction.tpot >= bound / (answer.best.layout.decode.drafts + 1)
        assert numbers["ttft_ms"].value > 0 and numbers["max_context_tokens"].value <= 1_048_576, question


def test_the_verdict_is_about_the_printed_latencies(answers: Answers) -> None:
    for question, answer in answers:
        tpot, ttft = (answer.numbers[name].value / 1e3 for name in ("tpot_ms", "ttft_ms"))
        if answer.best.verdict in (MEETS, SHEDS):
            assert answer.question.slo.excess(tpot, ttft) <= 1, question
        elif answer.question.workload.rate is None:
            assert answer.question.slo.excess(tpot, ttft) > 1, question


def test_the_text_says_what_the_json_says(answers: Answers) -> None:
    for question, answer in answers:
        answer = with_commands(answer)
        printed = StringIO()
        show(answer, Console(file=printed, width=80, highlight=False))
        text, report = " ".join(printed.getvalue().splitlines()), answer.to_dict()
        assert report["slo_met"] == answer.within_slo
        assert f"{answer.numbers['output_tokens_per_s'].value:,.0f} (" in text, question
        if question["slo"]:
            limits = (("tpot_ms", answer.question.slo.tpot), ("ttft_ms", answer.question.slo.ttft))
            slow = any(limit and answer.numbers[name].high > 1e3 * limit for name, limit in limits)
            expected = "not at the slow end" if slow else "also at the slow end"
            assert (expected if answer.within_slo else "met") in text, question


def test_a_long_run_is_the_steady_state(answers: Answers) -> None:
    for question, answer in answers[:10]:
        load = re.sub(r",requests=\d+", "", question["workload"])
        asked = question | {"layout": answer.best.layout.text(), "slo": None, "nodes": None}
        steady, long = (plan(**asked | {"workload": text}).numbers for text in (load, f"{load},requests=1000000"))
        for name in OUTPUTS:
            assert long[name].value == pytest.approx(steady[name].value, rel=0.02), (question, name)


def test_every_layout_that_is_shown_is_accepted_and_has_its_numbers(answers: Answers) -> None:
    for question, answer in answers:
        shown = [answer.best, *answer.others[:2], *([answer.experimental] if answer.experimental else [])]
        for candidate in (c for c in shown if c.admitted is None):  # else its numbers are those of fewer clients
            again = plan(**question | {"layout": candidate.layout.text(), "slo": None}).best
            assert again.layout == candidate.layout, question
            assert again.prediction.tok_s == pytest.approx(candidate.prediction.tok_s, rel=1e-6), question


def test_json_rebuilds_the_layout(answers: Answers) -> None:
    for question, answer in answers:
        report = json.loads(json.dumps(answer.to_dict()))
        for shown, candidate in zip([report, *report["others"]], [answer.best, *answer.others], strict=False):
            rebuilt = parse_layout(shown["layout"]["text"], answer.question.model.config, 1.0)
            assert rebuilt == candidate.layout, question


def test_one_name_has_one_number(answers: Answers) -> None:
    for question, answer in answers:
        names = [str(c.layout) for c in (answer.best, *answer.others)]
        assert len(names) == len(set(names)), question
        assert answer.experimental is None or str(answer.experimental.layout) not in names


def test_no_other_layout_is_clearly_better_without_a_reason(answers: Answers) -> None:
    for question, answer in answers:
        for other in answer.others:
            if other.rank == answer.best.rank and not other.unsure:
                assert other.value <= answer.best.value / EQUAL * 1.01, (question, str(other.layout))


def test_what_waits_is_said_by_its_cause(answers: Answers) -> None:
    for question, answer in answers:
        layout, p = answer.best.layout, answer.best.prediction
        admitted = layout.decode.sequences * layout.decode.dp * layout.replicas
        notes = " ".join(answer.notes)
        if layout.prefill is None:
            assert p.running <= admitted * 1.001, question
        assert ("--max-num-seqs" in notes) == (p.bound == "seqs") and ("cache memory" in notes) == (p.bound == "memory")
        if p.bound in ("seqs", "memory"):
            assert answer.question.workload.concurrency > p.running * 0.99, question


def test_idle_machines_are_explained(answers: Answers) -> None:
    for question, answer in answers:
        idle = answer.nodes - answer.best.nodes
        assert idle >= 0 and any(f"{idle} stay idle" in note for note in answer.notes) == (idle > 0), question


def test_more_machines_are_not_slower_and_do_not_lose_the_slo() -> None:
    for load, slo in (("in=3500,out=1500,concurrency=256", None), ("in=16000,out=1000,concurrency=64", "ttft=5s")):
        best, verdict = 0.0, MISSES
        for nodes in (1, 2, 4, 8):
            answer, where = plan(quant="w4a8", nodes=nodes, workload=load, slo=slo).best, (load, nodes)
            assert answer.verdict <= verdict and answer.value >= EQUAL * best * (answer.verdict == verdict), where
            best, verdict = max(best * (answer.verdict == verdict), answer.value), answer.verdict


def test_more_context_is_never_quicker_and_more_clients_never_slower() -> None:
    common = {"quant": "w4a8", "layout": "tp=16", "mtp": 3}
    long = [plan(**common, workload=f"in={n},out=500,concurrency=1") for n in (500, 4000, 32_000, 128_000)]  # type: ignore[arg-type]
    waits = [result.numbers["tpot_ms"].value for result in long]
    assert waits == sorted(waits)
    many = [plan(**common, workload=f"in=3500,out=500,concurrency={n}") for n in (1, 4, 16, 64)]  # type: ignore[arg-type]
    speeds = [result.numbers["output_tokens_per_s"].value for result in many]
    assert speeds == sorted(speeds)


def test_fewer_clients_do_not_get_more_within_the_slo() -> None:
    common = {"model": "glm-5.2", "quant": "w4a8c8", "nodes": 10, "slo": "ttft=7s"}
    few, many = (plan(**common, workload=f"in=32000,out=8000,concurrency={n}") for n in (400, 512))  # type: ignore[arg-type]
    assert many.numbers["output_tokens_per_s"].value >= 0.95 * few.numbers["output_tokens_per_s"].value
    assert many.best.admitted is not None and not many.within_slo
    assert many.verdict.startswith(f"met for {many.best.admitted:g} of 512 clients")
    hard = plan(nodes=8, slo="tpot=20ms", workload="in=65000,out=1000,concurrency=300")
    assert hard.best.verdict == SHEDS, "every layout is asked, not only the fastest ones"


LAYOUTS = ("tp=2,dp=16,prefill_tp=8,prefill_dp=1,prefill_pp=2,prefills=2", "tp=8,dp=4", "tp=4,dp=8,dsa_cp=1,seqs=6")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("key", "values"), [("concurrency", (7, 63, 425)), ("in", (4095, 8191)), ("requests", (300,))])
def test_no_input_makes_a_jump(layout: str, key: str, values: tuple[int, ...]) -> None:
    """One more client, prompt token or request changes an output as the one before and the one after it do."""
    load = {"in": 3500, "out": 1500, "concurrency": 64, "requests": 1000}
    for value in values:
        texts = [",".join(f"{k}={v}" for k, v in (load | {key: n}).items()) for n in range(value - 1, value + 3)]
        answers = [plan(quant="w4a8", layout=layout, workload=text).numbers for text in texts]
        for name in OUTPUTS:
            before, step, after = (abs(math.log(b[name].value / a[name].value)) for a, b in itertools.pairwise(answers))
            assert step <= 3 * max(before, after) + 0.01, (name, value, before, step, after)


def test_one_client_needs_one_machine() -> None:
    answer = plan(quant="w4a8", nodes=10, workload="in=3500,out=512,concurrency=1")
    assert any("one machine is enough" in note for note in answer.notes), answer.notes


def test_without_a_number_of_machines_the_fewest_that_meet_the_slo() -> None:
    question: dict[str, Any] = {"slo": "tpot=50ms,ttft=2s", "workload": "in=3500,out=1500,concurrency=300"}
    answer = plan(**question)
    assert answer.within_slo and answer.nodes > 1
    assert not plan(**question, nodes=answer.nodes - 1).within_slo
    assert plan(quant="bf16").nodes == 2, "without an SLO: as many as the weights need"


def test_commands_over_machines_are_complete() -> None:
    """Pipeline stages on two machines, and several engines whose ports and ids must differ."""
    text = "tp=4,dp=8,replicas=2,prefill_tp=16,prefill_pp=2,prefill_dsa_cp=0,prefills=2"
    answer = plan(quant="w8a8", layout=text, workload="in=3500,out=1500,concurrency=64")
    printed = dict(lines(answer.question.model, answer.best.layout, answer.question.hardware, 5000))
    for flag in ("--nnodes 2", '--node-rank "$NODE"', '--master-addr "$HEAD"', "VLLM_PP_LAYER_PARTITION=39,39"):
        assert flag in printed["prefill"], flag
    for role, line in printed.items():
        assert f"{role}-$ENGINE-$RANK" in line and "+256*ENGINE" in line and "+LOCAL))" in line


def test_flashcomm_of_w4a8_is_named_wherever_drafts_are_used(answers: Answers) -> None:
    for question, answer in answers:
        commands = "\n".join(with_commands(answer).lines)
        named = any("P7w" in note for note in answer.notes)
        used = "enable_flashcomm1" in commands and answer.question.model.expert_type == "W4A8_DYNAMIC"
        used = used and answer.best.layout.decode.drafts > 0
        assert answer.best.evidence.profile or named == used, question


def test_an_experimental_layout_is_worth_a_trial_and_says_what_it_costs(answers: Answers) -> None:
    for question, answer in answers:
        trial = answer.experimental
        if trial is not None and answer.best.evidence.tag != "experimental":
            better = trial.rank < answer.best.rank
            assert better or trial.value > 1.1 * answer.best.value, question
    dcp = plan(quant="w4a8", layout="tp=16,dcp=16", workload="in=3500,out=1500,prefix_hit=0.9")
    assert dcp.best.evidence.tag == "experimental"
    assert any("13710" in note for note in dcp.notes) and any("prefix cache" in note for note in dcp.notes)
