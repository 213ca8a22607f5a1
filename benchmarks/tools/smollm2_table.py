"""SmolLM2's table of report_fidelity.py: what each recipe costs on three kinds of real text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glm5_ascend.fidelity.evaluation.compare import FidelityComparison, compare
from glm5_ascend.fidelity.evaluation.metrics import Metric, metrics
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from tools.fidelity_checkpoints import quantized, quantized_by_peer, with_mtp_layer
from tools.real_texts import versions, write_texts

WINDOW = 384
#: Windows of all texts, at most.
WINDOWS = 48
CONTROL = "rtn-w4a8"
RECIPES = (CONTROL, "w4a8", "w4a8-best", "w8a8", "w8a8-best")
#: Calibration of msModelSlim, 2,048 tokens: the time of its search grows with the tokens.
PEER_SAMPLES = 4
#: KL to bf16 over all texts, as a share of plain rounding's, at most.
SHARES = {"w4a8": 0.4, "w4a8-best": 0.4, "w8a8": 0.03}


@dataclass
class RealRow:
    """One checkpoint; `texts`: the comparison by kind of text."""

    name: str
    whole: FidelityComparison
    texts: dict[str, FidelityComparison]

    @property
    def figures(self) -> dict[str, Metric]:
        return {figure.name: figure for figure in metrics(self.whole)}

    @property
    def mean_kl(self) -> float:
        return float(self.whole.kl.mean())

    def nll_change(self, text: str) -> float:
        comparison = self.texts[text]
        return float((comparison.nll_quantized - comparison.nll_reference).mean())


def smollm2_table(source: Path, work: Path, limit: int, peer: Path | None) -> list[RealRow]:
    """Quantize SmolLM2 with every recipe, and with msModelSlim where the python of its environment is given."""
    work.mkdir(exist_ok=True)
    texts = read_tasks(write_texts(work / "texts.jsonl"), source, WINDOW, min(limit, WINDOWS))
    print(f"\nSmolLM2-135M, {len(texts.windows)} windows of {WINDOW} tokens; texts of {versions()}", flush=True)
    paths = {recipe: quantized(source, work / recipe, recipe, []) for recipe in RECIPES}
    if peer:
        with_mtp = with_mtp_layer(source, work / "with-mtp")
        for recipe in ("w4a8", "w8a8"):
            paths[f"msModelSlim {recipe}"] = quantized_by_peer(
                with_mtp, work / f"peer-{recipe}", recipe, peer, samples=PEER_SAMPLES
            )
    rows = []
    for name, path in paths.items():
        whole = compare(path, source, texts.windows)
        rows.append(RealRow(name, whole, {task: whole.select(index) for task, index in texts.by_task().items()}))
        if len(rows) == 1:
            _show_head(rows[0])
        _show(rows[-1])
    return rows


def _show_head(row: RealRow) -> None:
    for task, comparison in row.texts.items():
        nll = comparison.nll_reference.mean()
        print(f"bf16: {task}: NLL {nll:.4f}, perplexity {nll.exp():.2f}, {comparison.kl.numel()} positions")
    columns = "".join(f" {task + ': KL, top-1, NLL':>36}" for task in row.texts)
    print(f"{'':18} {'KL to bf16':>27} {'top-1':>6} {'NLL':>26}{columns}")


def _show(row: RealRow) -> None:
    kl, top1, nll = (row.figures[name] for name in ("kl_mean", "top1_agreement", "nll_delta"))
    texts = "".join(
        f" {float(c.kl.mean()):18.4f} {c.same_top1.double().mean():8.1%} {row.nll_change(task):+8.4f}"
        for task, c in row.texts.items()
    )
    print(
        f"{row.name:18} {kl.value:8.4f} {_ends(kl, '.4f'):>18} {top1.value:6.1%} {nll.value:+8.4f} "
        f"{_ends(nll, '+.4f'):>17}{texts}",
        flush=True,
    )


def _ends(figure: Metric, format: str) -> str:
    low, high = figure.interval or (0.0, 0.0)
    return f"[{low:{format}}, {high:{format}}]"


def smollm2_checks(rows: list[RealRow]) -> dict[str, bool]:
    """What the recipes promise, by a sentence each."""
    by_name = {row.name: row for row in rows}
    control, results = by_name[CONTROL], {}
    for recipe, share in SHARES.items():
        ratio = by_name[recipe].mean_kl / control.mean_kl
        results[f"SmolLM2: KL of {recipe} <= {share} x plain rounding's (is {ratio:.3f} x)"] = ratio <= share
    for recipe in ("w4a8", "w8a8"):
        if peer := by_name.get(f"msModelSlim {recipe}"):
            ratio = by_name[recipe].mean_kl / peer.mean_kl
            results[f"SmolLM2: KL of {recipe} below msModelSlim's (is {ratio:.2f} x)"] = ratio < 1
    ours = by_name["w4a8"]
    worse = [text for text in ours.texts if ours.nll_change(text) >= control.nll_change(text)]
    results[
        f"SmolLM2: NLL of w4a8 below plain rounding's on every text (not on: {', '.join(worse) or 'none'})"
    ] = not worse
    return results
