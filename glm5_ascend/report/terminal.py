"""Tables for the console: colours only on a terminal (not with NO_COLOR), whole words at any width."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

GAP = 2
STYLES = {"ok": "green", "info": "", "warning": "yellow", "problem": "red"}


def text_console(stderr: bool = False) -> Console:
    """A console on which text is text: brackets, `:codes:` and numbers in names of strangers mean nothing."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def show(rows: Iterable[Sequence[str | Text]], console: Console | None = None, right: Collection[int] = ()) -> None:
    """Print rows of cells; the last column wraps. Where a word is wider than the console, lines get longer.

    Args:
        right: columns that are aligned right.
    """
    from rich.table import Table
    from rich.text import Text

    console = console or text_console()
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    if not cells:
        return
    fixed = [max(row[i].cell_len for row in cells) for i in range(len(cells[0]) - 1)]
    word = max((len(word) for row in cells for word in row[-1].plain.split()), default=1)
    grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    sides: list[Literal["left", "right"]] = ["right" if i in right else "left" for i in range(len(cells[0]))]
    for width, side in zip(fixed, sides, strict=False):
        grid.add_column(min_width=width, no_wrap=True, justify=side)
    grid.add_column(min_width=word, overflow="fold", justify=sides[-1])
    for row in cells:
        grid.add_row(*row)
    needed = sum(width + GAP for width in fixed) + word + GAP
    if needed > console.width:
        console.width = needed
    with console.capture() as shown:
        console.print(grid, crop=False)
    for line in shown.get().splitlines():
        console.file.write(line.rstrip() + "\n")
