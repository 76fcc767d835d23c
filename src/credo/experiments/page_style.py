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
thead th[tabindex] { cursor: pointer; }
thead th[aria-sort="ascending"]::after { content: " ▲"; }
thead th[aria-sort="descending"]::after { content: " ▼"; }
@media (max-width: 40rem) {
  main { padding: 1rem .75rem 3rem; }
  tbody th { position: sticky; left: 0; background: var(--paper); }
  tbody th, td.who { max-width: 9rem; white-space: normal; }
}
figure { margin: 1.5rem 0; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px; padding: .5rem; }
@media (prefers-color-scheme: light) { figure img { border: 1px solid var(--rule); } }
"""

# A click on a heading sorts by that column, a second one the other way. Published lines stay below the line of ours
# that they belong to; lines without a number come last.
SORT_SCRIPT: Final = """
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (!head.textContent) return;
    head.tabIndex = 0;
    const sort = () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const groups = [];
      for (const row of body.rows) {
        if (row.className === "ours" || !groups.length) groups.push([]);
        groups[groups.length - 1].push(row);
      }
      const text = (group) => group[0].cells[column].textContent;
      const number = (group) => parseFloat(text(group).replace("−", "-"));
      groups.sort((a, b) => {
        if (column === 0) return sign * text(a).localeCompare(text(b));
        const [x, y] = [number(a), number(b)];
        return Number.isNaN(x) - Number.isNaN(y) || sign * (x - y) || 0;
      });
      body.append(...groups.flat());
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
"""
