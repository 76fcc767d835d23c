"""The table: means over seeds, and whether each row holds beside Adam."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

Line = dict[str, Any]
COLUMNS = {
    "nll": 3,
    "nll_tempered": 3,
    "accuracy": 1,
    "rmse": 3,
    "ece": 3,
    "seconds": 1,
    "curvature_share": 2,
    "spread": 2,
    "signal_to_noise": 1,
}
NLL_SHARE, NLL_LEAST, POINTS, RMSE_SHARE = 0.03, 0.03, 1.0, 0.03  # how much worse than Adam still holds


def means(lines: Iterable[Line]) -> Line:
    """Over the seeds of one row; a run that failed makes the row fail."""
    rows = list(lines)
    if any("error" in row for row in rows):
        return {"error": next(row["error"] for row in rows if "error" in row), "seeds": len(rows)}
    return {name: fmean(row[name] for row in rows) for name in COLUMNS if name in rows[0]} | {
        "seeds": len(rows)
    }


def holds(row: Line, adam: Line) -> bool:
    """NLL at most Adam's and 3 % (at least .03), accuracy within a point, RMSE within 3 %."""
    if "error" in row or not math.isfinite(row["nll"]):
        return False
    within = row["nll"] <= adam["nll"] + max(NLL_SHARE * abs(adam["nll"]), NLL_LEAST)
    if "rmse" in row:
        return bool(within and row["rmse"] <= adam["rmse"] * (1 + RMSE_SHARE))
    return bool(within and row["accuracy"] >= adam["accuracy"] - POINTS)


def table(lines: Sequence[Line]) -> str:
    text = []
    tally: dict[str, list[int]] = {}
    for problem in dict.fromkeys(line["problem"] for line in lines):
        own = [line for line in lines if line["problem"] == problem]
        methods = list(dict.fromkeys(line["method"] for line in own))
        rows = {method: means(line for line in own if line["method"] == method) for method in methods}
        if not rows:
            continue
        adam = rows.get("Adam")
        first = next(iter(rows.values()))
        columns = [name for name in COLUMNS if any(name in row for row in rows.values())]
        text += ["", f"**{problem}** ({first['seeds']} seeds)", ""]
        text += ["| | " + " | ".join(columns) + " | holds |", "|---" * (len(columns) + 2) + "|"]
        for method, row in sorted(rows.items(), key=lambda item: item[1].get("nll", math.inf)):
            cells = [f"{row[name]:.{COLUMNS[name]}f}" if name in row else "–" for name in columns]
            verdict = "" if adam is None else ("yes" if holds(row, adam) else "NO")
            if adam is not None and "error" not in adam:
                own_tally = tally.setdefault(method, [0, 0, 0])
                own_tally[0] += verdict == "yes"
                own_tally[1] += "nll" in row and row["nll"] < adam["nll"]
                own_tally[2] += 1
            text.append(f"| {method} | " + " | ".join(cells) + f" | {row.get('error', verdict)[:80]} |")
    text += ["", "| | holds beside Adam | better NLL | problems |", "|---|---|---|---|"]
    text += [f"| {method} | {held} | {better} | {count} |" for method, (held, better, count) in tally.items()]
    return "\n".join(text)


def overview(lines: Sequence[Line]) -> str:
    """One row a problem, NLL / accuracy or RMSE of each method, the share of VOGN's; then who holds beside Adam."""
    methods = list(dict.fromkeys(line["method"] for line in lines))
    problems = list(dict.fromkeys(line["problem"] for line in lines))
    rows = {
        (problem, method): means(own)
        for problem in problems
        for method in methods
        if (own := [line for line in lines if (line["problem"], line["method"]) == (problem, method)])
    }
    text = [f"| problem | {' | '.join(methods)} | share |", "|---" * (len(methods) + 2) + "|"]
    for problem in problems:
        cells = [_cell(rows.get((problem, method))) for method in methods]
        share = rows.get((problem, "VOGN"), {}).get("curvature_share")
        text.append(f"| {problem} | {' | '.join(cells)} | {'–' if share is None else f'{share:.2f}'} |")
    text += ["", "| | holds beside Adam | better NLL | problems | not |", "|---|---|---|---|---|"]
    for method in methods[1:]:
        pairs = {p: (rows[p, "Adam"], rows[p, method]) for p in problems if (p, method) in rows}
        missed = [p for p, (adam, row) in pairs.items() if not holds(row, adam)]
        better = sum("nll" in row and row["nll"] < adam["nll"] for adam, row in pairs.values())
        text.append(
            f"| {method} | {len(pairs) - len(missed)} | {better} | {len(pairs)} | {'; '.join(missed)} |"
        )
    return "\n".join(text)


def _cell(row: Line | None) -> str:
    if row is None or "error" in row:
        return "–" if row is None else "error"
    score = f"{row['accuracy']:.1f}" if "accuracy" in row else f"{row['rmse']:.3f}"
    return f"{row['nll']:.3f} / {score}"
