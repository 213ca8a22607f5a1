"""Time: the model against public results, and against what must be true of any machine."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tools.planner_fit import PRIORS, errors, fit, predictions, residuals, to_constants, to_vector
from glm5_ascend.plan.evidence import Case, cases, make_case, medians
from glm5_ascend.plan.hardware import Constants, Hardware, fitted, load_hardware
from glm5_ascend.plan.inputs import ACCEPTANCE, Workload, parse_workload, tokens_per_step
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import named
from glm5_ascend.plan.operators import StepLoad, imbalance, most_of, step_operators
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.steps import Steps

A3, ENGINE = load_hardware("a3"), Engine(4, 8, dsa_cp=True)
MODEL, FITTED = named("glm-5.1", "w8a8c8", "li"), fitted().constants
PERFECT = Constants(memory=1, compute=1, graph_seconds=0, eager_seconds=0, token_seconds=0, step_seconds=0)


def steps(hardware: Hardware = A3, constants: Constants = FITTED, model: str = "glm-5.1") -> Steps:
    return Steps(named(model, "w8a8c8", "li"), hardware, constants)


def test_committed_constants_explain_the_public_rows() -> None:
    """Errors of rows that the fit saw; those of rows of a source that it did not see are larger, but limited, too."""
    judged = [case for case in cases() if case.judged]
    seen = errors(judged, FITTED)
    for name, limit in {"tok_s": 0.10, "ttft": 0.15, "tpot": 0.25}.items():
        assert np.median([abs(np.expm1(row[name])) for row in seen if name in row]) <= limit, name
    unseen = medians(judged)
    assert {case.row.id for case in cases()} == set(fitted().unseen) and 0.75 <= fitted().inside <= 0.9
    assert all(unseen[name][0] <= limit for name, limit in {"tok_s": 0.20, "ttft": 0.30, "tpot": 0.30}.items())
    heavy = [e["tok_s"] for c, e in zip(judged, seen, strict=True)
             if "tok_s" in e and c.workload.fresh > 3 * c.workload.output]  # fmt: skip
    assert -0.15 < np.median(heavy) < 0.1, "prompt-heavy rows are not promised too much"


def test_committed_constants_are_a_minimum() -> None:
    """A step of any constant makes the fit worse."""

    def objective(x: np.ndarray) -> float:
        return float((residuals(cases(), to_constants(x)) ** 2).sum() + x @ x)

    best = to_vector(FITTED)
    for step in 0.3 * np.concatenate([np.eye(len(PRIORS)), -np.eye(len(PRIORS))]):
        assert objective(best + step) > objective(best)


@pytest.fixture(scope="module")
def synthetic() -> list[Case]:
    """Runs predicted with other constants than the fitted ones."""
    constants = to_constants(np.array([0.5, -0.6, 0.6, -0.5, 0.6, 0.5]))
    rows = [case for case in cases() if case.row.id.startswith("5.1")][:8]
    pairs = zip(rows, predictions(rows, constants), strict=True)
    return [make_case(c.row.model_copy(update={"out_tok_s": p.tok_s})) for c, p in pairs]


def worst(runs: list[Case], constants: Constants) -> float:
    return max(abs(error) for row in errors(runs, constants) for error in row.values())


def test_a_fit_finds_the_constants_that_made_the_data_and_one_wild_run_hardly_bends_it(synthetic: list[Case]) -> None:
    start = to_constants(np.zeros(len(PRIORS)))
    assert worst(synthetic, fit(synthetic, start)) < 0.06 < worst(synthetic, start)
    first = synthetic[0]
    wild = make_case(first.row.model_copy(update={"out_tok_s": 8 * first.measured["tok_s"]}))
    assert worst(synthetic[1:], fit([wild, *synthetic[1:]], start)) < 0.12


def test_perfect_constants_are_a_lower_bound_and_faster_memory_helps() -> None:
    faster = A3.model_copy(update={"rates": A3.rates.model_copy(update={"memory": 2 * A3.rates.memory})})
    for batch in (1.0, 8.0, 32.0):
        real = steps().decode(ENGINE, batch, 4000, 8)
        assert steps(constants=PERFECT).decode(ENGINE, batch, 4000, 8).seconds < real.seconds
        quick = steps(faster).decode(ENGINE, batch, 4000, 8)
        assert quick.seconds < real.seconds and quick.by_limit["host"] == real.by_limit["host"]
        assert sum(real.by_limit.values()) == pytest.approx(real.seconds) == sum(real.by_op.values())


def test_decoding_without_graphs_pays_for_each_launch() -> None:
    graphs, eager = (steps().decode(Engine(8, 2, drafts=0, eager=e), 1, 100, 2).by_limit["host"] for e in (False, True))
    assert eager == pytest.approx(78 * FITTED.eager_seconds + FITTED.step_seconds) and graphs < eager


@pytest.mark.parametrize(("model", "active"), [("glm-5", 40.8e9), ("glm-5.3-flash", 16.7e9)])
def test_operations_of_a_token_are_those_of_its_active_weights(model: str, active: float) -> None:
    """Two operations per active parameter, counted independently, without embedding (and Flash's vision tower)."""
    ops = step_operators(named(model, "bf16"), A3, Engine(1, 1, drafts=0), StepLoad(1, 1, 1))
    others = ("lightning indexer", "sparse attention", "router", "KDA", "residual streams")
    assert sum(op.bf16 for op in ops if op.name not in others) / 2 == pytest.approx(active, rel=0.02)


def test_a_step_reads_int4_experts_as_they_are_packed() -> None:
    """GLM-5's eight experts of one token: half a byte per weight, and scales."""
    step = StepLoad(tokens=1, requests=1, context=512)
    nbytes = {}
    for quantization in ("w4a8", "w8a8", "bf16"):
        operators = step_operators(named("glm-5", quantization), A3, Engine(1, drafts=0), step)
        nbytes[quantization] = sum(operator.nbytes for operator in operators if operator.name == "experts")
    weights = 75 * 8 * 3 * 6144 * 2048
    assert nbytes["w4a8"] == pytest.approx(weights / 2, rel=0.02)
    assert nbytes["w8a8"] == pytest.approx(weights, rel=0.01) and nbytes["bf16"] == pytest.approx(2 * weights, rel=0.01)


def test_index_sharing_and_dsa_cp_save_long_prefills() -> None:
    """GLM-5.2 scores in 21 of 78 layers: at 128k the indexer is most of GLM-5.1's prefill."""
    whole, divided = Engine(16, 2), Engine(16, 2, dsa_cp=True)
    old, new, split = (
        steps(model=model).chunk(engine, 4096, 122_000, 1, 1)
        for model, engine in (("glm-5.1", whole), ("glm-5.2", whole), ("glm-5.1", divided))
    )
    assert new < 0.7 * old and split < 0.5 * old
    cached = steps(model="glm-5.1").chunk(Engine(16, 2, index_cache=True), 4096, 122_000, 1, 1)
    assert cached == pytest.approx(new, rel=0.1)


def test_dcp_has_no_prefix_hits() -> None:
    """vllm-ascend 13750: they disappear, so they must not be counted."""
    layout = Layout(Engine(16, 1, 16))
    without, with_hits = (predict(steps(), layout, Workload(60_000, 500, 4, hit)) for hit in (0.0, 0.9))
    assert without and with_hits and without.tok_s == with_hits.tok_s


def test_warm_caches_and_more_acceptance_are_faster() -> None:
    layout = Layout(Engine(8, 4, dsa_cp=True))
    load = "in=32000,out=500,concurrency=4,requests=8,prefix_hit=0.9"
    cold, warm = (predict(steps(), layout, parse_workload(text)) for text in (load, f"{load},warm=1"))
    assert cold and warm and warm.tok_s > 1.1 * cold.tok_s and warm.ttft < cold.ttft
    poor, healthy = (predict(steps(), layout, Workload(500, 500, 1), x) for x in (1.5, 3.3))
    assert poor and healthy and poor.tpot / healthy.tpot == pytest.approx(3.30 / 1.5, rel=0.01)


def test_tokens_of_a_step_by_drafts() -> None:
    """None, one and three drafts of the public log; a fifth is accepted as often of a fourth as a third of a second."""
    first, second, third = ACCEPTANCE
    assert [tokens_per_step(n, None) for n in (0, 1, 3)] == pytest.approx([1, 1 + first, 1 + sum(ACCEPTANCE)])
    further = third * third / second * (1 + third / second)
    assert tokens_per_step(5, None) == pytest.approx(1 + sum(ACCEPTANCE) + further)
    assert tokens_per_step(3, 2.5) == pytest.approx(2.5) and tokens_per_step(1, 1.0) == 1


def test_the_most_loaded_die_of_random_experts() -> None:
    random = np.random.default_rng(0)
    for mean in (4.0, 16.0, 64.0):
        sampled = (random.poisson(mean, (2000, 32)).max(axis=1) / mean).mean()
        assert imbalance(mean, 32) == pytest.approx(sampled, rel=0.1)


def test_the_die_with_the_most_experts_that_have_a_token() -> None:
    random = np.random.default_rng(0)
    for experts, share in ((8, 0.1), (8, 0.6), (16, 0.95)):
        sampled = (random.random((2000, 32, experts)) < share).sum(axis=2).max(axis=1).mean()
        assert most_of(experts, share, 32) == pytest.approx(sampled, rel=0.02)
    assert most_of(256, 0.5, 1) == pytest.approx(128)


@pytest.mark.parametrize(("many", "few"), [("", ",prefixes=1"), ("", ",hits=host"), (",hits=pool", ",hits=host")])
def test_own_prefixes_need_caches_of_their_own(many: str, few: str) -> None:
    """Clients with a prefix each fill the caches of a rank; one prefix, the host's memory or a pool keep all hits."""
    layout, load = Layout(Engine(8, 4, sequences=32)), "in=60000,out=500,concurrency=16,prefix_hit=0.9"
    slow, quick = (predict(steps(), layout, parse_workload(load + more)) for more in (many, few))
    assert slow and quick and slow.tok_s < quick.tok_s and slow.ttft > quick.ttft
    assert quick.hit == 0.9 and slow.hit == (0.9 if many else pytest.approx(0.9 * slow.memory.resident(
        parse_workload(load), slow.memory.most_requests(layout.decode, parse_workload(load)))))  # fmt: skip


def test_a_decode_rank_holds_whole_requests() -> None:
    """UCM counts one request of 128k in 235,008 tokens, eight on eight ranks; the others wait for their first token."""
    case = next(case for case in cases() if case.row.id == "ucm-5.1-pd-128k-20-90")
    made = Steps(case.model, case.hardware, FITTED)
    memory = made.memory(case.layout.decode, True, True)
    assert memory.tokens() == pytest.approx(235_008, rel=0.05)
    assert memory.most_requests(case.layout.decode, case.workload) == 1
    full = predict(made, case.layout, case.workload)
    half = predict(made, case.layout, parse_workload("in=131072,out=1024,concurrency=6,prefix_hit=0.9,hits=pool"))
    assert full and half and full.bound == "memory" and full.ttft > 2 * half.ttft
