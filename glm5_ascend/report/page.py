"""A report as one HTML file: no network, no script, readable on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from glm5_ascend.errors import OutputError

_MADE_BY = '<meta name="generator" content="glm5-ascend">'
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5a6572; --line: #d7dde4; --page: #ffffff; --card: #f5f7f9;
  --one: #2a6fbb; --two: #c2571a; --free: #6fae7b; --a: #1f5a9e; --b: #3f86cf; --c: #7fb2e6; --d: #5b3f98; --e: #8a6fc0;
  --f: #b9a3dd; --g: #0f7c86; --h: #5bb3ba; --i: #a8431a; --j: #d8803f; --k: #edb98a; --l: #8d6b2f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9aa5b1; --line: #39424c; --page: #14181c;
  --card: #1d2329; --one: #6aa9ec; --two: #ee9a5e; --free: #5a9668; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); }
h1 { font-size: 1.4rem; margin: 0.5rem 0 0; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.3rem 0; } .soft { color: var(--soft); font-size: 0.9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.7rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.7rem 0.9rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.2; } .card span { color: var(--soft); font-size: 0.85rem; }
svg { display: block; width: 100%; max-width: 36rem; height: auto; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg text.soft { fill: var(--soft); font-size: 11px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
td, th { text-align: right; padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; padding: 0.7rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.82rem; }
"""


def page(title: str, body: Iterable[str]) -> str:
    """The whole document; `title` is plain text, `body` is HTML."""
    head = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{_MADE_BY}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    return "\n".join([*head, *body, "</body></html>"]) + "\n"


def card(key: str, value: str, label: str, small: str = "") -> str:
    """A key figure; `key` is its id in the page."""
    rest = f"<br>{escape(small)}" if small else ""
    return f'<div class="card" id="{key}"><b>{escape(value)}</b><span>{escape(label)}{rest}</span></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Plain text cells; the first column is set left."""
    yield "<div class='wide'><table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table></div>"


def check_place(path: Path) -> None:
    """Before the work: a file that is no report of ours is not replaced.

    Raises:
        OutputError: it exists, or its directory does not.
    """
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent}: no such directory", "create it, or name another file with --html")
    if path.is_dir():
        raise OutputError(f"{path}: is a directory", "name a file with --html")
    if path.exists() and _MADE_BY.encode() not in path.read_bytes()[:1000]:
        raise OutputError(f"{path}: exists and is no report of this tool", "name another file with --html")


def write(path: Path, document: str) -> None:
    """Write a report, over an older one of ours if there is one.

    Raises:
        OutputError: the file is something else.
    """
    check_place(path)
    path.write_text(document, encoding="utf-8")
