"""The style of the HTML pages, light and dark; figures stand on white in both."""

from typing import Final

PAGE_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5a6470; --rule: #d5dae0; --paper: #fff; --shade: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9aa5b1; --rule: #39424c; --paper: #14181c; --shade: #1d2329; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 88rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
p, figcaption, dd { max-width: 60rem; }
p, nav, details, figcaption { color: var(--soft); font-size: .9rem; }
a { color: inherit; }
nav ul { padding-left: 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .35rem .5rem; text-align: right; }
thead th { border-bottom: 2px solid var(--rule); white-space: normal; vertical-align: bottom; }
tbody th, td.who, thead th:first-child { text-align: left; }
tr.ours th, tr.ours td { border-top: 1px solid var(--rule); }
tr.paper td { color: var(--soft); }
td.who { color: var(--soft); }
tbody tr.ours:hover, tbody tr.paper:hover { background: var(--shade); }
dt { font-weight: 600; }
dd { margin: 0 0 .5rem 1rem; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px; padding: .5rem; }
@media (prefers-color-scheme: light) { figure img { border: 1px solid var(--rule); } }
"""
