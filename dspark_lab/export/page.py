"""The frame of a page that stands alone: style inside, nothing loaded, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: Longer texts are cut in tables: names of kernels go to thousands of characters.
LONG = 140
_STYLE = """
:root{--ink:#1f2937;--faint:#6b7280;--line:#e5e7eb;--card:#fff;--back:#f6f7f9;--lane:#eef0f3;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--ink:#e5e7eb;--faint:#9ca3af;--line:#374151;--card:#161b22;--back:#0d1117;--lane:#20262e}}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}
main{max-width:1040px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:22px;margin:0 0 14px}h2{font-size:16px;margin:0 0 2px}
section,.verdict,.facts>div{background:var(--card);border:1px solid var(--line);border-radius:8px}
section{padding:16px 18px;margin:16px 0;overflow-x:auto}section>p.sub,.note{color:var(--faint);margin:0 0 8px;font-size:13px}
.verdict{padding:14px 18px;border-left:6px solid #4b5563;margin:0 0 10px}.verdict b{text-transform:uppercase;font-size:12px;letter-spacing:.06em;margin-right:8px}
.verdict.slower{border-left-color:#d55e00}.verdict.faster{border-left-color:#009e73}.verdict.withheld{border-left-color:#e69f00}
.withheld,.undermined{color:#b34700;font-weight:600}@media (prefers-color-scheme:dark){.withheld,.undermined{color:#f0883e}}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin:14px 0}
.facts>div{padding:10px 14px}.facts span{display:block;color:var(--faint);font-size:12px}.facts b{font-size:19px}.facts i{display:block;font-style:normal;color:var(--faint);font-size:12px;overflow-wrap:anywhere}
svg{width:100%;min-width:640px;height:auto;display:block}svg text{fill:var(--ink);font-size:12px}svg .name{text-anchor:end}svg .tick{text-anchor:middle;fill:var(--faint);font-size:11px}
svg .v{font-size:11px}svg .grid{stroke:var(--line)}svg .zero,svg .end{stroke:var(--faint);stroke-dasharray:3 3}svg .lane{fill:var(--lane)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:12px;color:var(--faint);margin:8px 0 0}.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
table{border-collapse:collapse;width:100%;font-size:12.5px}th,td{text-align:left;padding:4px 8px;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
th{color:var(--faint);font-weight:600}td:not(.w):not(.n),th{white-space:nowrap}td.w{min-width:120px}td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}tr:last-child td{font-weight:600}
ul{margin:4px 0;padding-left:20px;font-size:13px}li ul{color:var(--faint)}
@media print{body{background:#fff}section{break-inside:avoid}}
"""


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>\n{body}</main></body></html>\n"
    )


def section(title: str, inner: str, about: str = "") -> str:
    """A titled card."""
    sub = f'<p class="sub">{escape(about)}</p>' if about else ""
    return f"<section><h2>{escape(title)}</h2>{sub}{inner}</section>\n"


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = (), wrap: Sequence[int] = ()
) -> str:
    """A table; columns at ``numbers`` are flush right, those at ``wrap`` may take several lines and are cut at ``LONG`` characters, whole
    in their tooltip. Everything is escaped."""
    classes = dict.fromkeys(numbers, " class=n") | dict.fromkeys(wrap, " class=w")

    def cell(tag: str, i: int, x: object) -> str:
        text = str(x)
        cut = i in wrap and len(text) > LONG
        tip = f' title="{escape(text)}"' if cut else ""
        return f"<{tag}{classes.get(i, '')}{tip}>{escape(text[:LONG] + '…' if cut else text)}</{tag}>"

    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(cell(tag, i, x) for i, x in enumerate(cells)) + "</tr>"

    return f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(line(r, 'td') for r in rows)}</tbody></table>"
