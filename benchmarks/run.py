"""`make bench`: time and peak memory of one step, credo beside Adam and the other libraries.

    python -m benchmarks.run --cases lenet5 alexnet --contenders engine engine-pure --seconds 60

Time is a ratio to a step of `torch.optim.Adam`, constructor untouched, in the same round and process.
"""

import argparse
import gc
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

import credo
from benchmarks.cases import CASES, CHECKED, Case
from benchmarks.contender import Contender, Running, short_reason
from benchmarks.memory import peak_megabytes
from benchmarks.oracle import relative_error, true_squares
from benchmarks.peers import ignore_warnings_of_peers
from benchmarks.registry import BASELINE, CONTENDERS, find_case, find_contender
from benchmarks.table import Row, block, heading, markdown, write_json
from benchmarks.timing import COMMON_ROUNDS, SLOW, Times, measure, quartiles

FOOTNOTE = f"""
Σg² error: relative to the truth, on {CHECKED} examples in float64, not on the float32 batch that is timed.
Over {SLOW} times Adam's time, a row has {COMMON_ROUNDS} rounds only; compare ratios, not ms, between rows."""


def main() -> None:
    options = parse()
    ignore_warnings_of_peers()
    if options.threads:
        torch.set_num_threads(options.threads)
    machine = this_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    contenders = [find_contender(name) for name in options.contenders]
    print(heading(), flush=True)
    rows: list[Row] = []
    for case in map(find_case, options.cases):
        measured = measure_case(case, contenders, options)
        print(block(case.title, measured), flush=True)
        rows += measured
    print(FOOTNOTE)
    if options.json:
        write_json(options.json, machine, rows)
    if options.markdown:
        options.markdown.write_text(markdown(rows) + "\n")


def parse() -> argparse.Namespace:
    cases, contenders = [case.name for case in CASES], [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--cases", nargs="+", choices=cases, default=cases, metavar="CASE", help=", ".join(cases)
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=contenders,
        default=contenders,
        metavar="WHO",
        help=f"{', '.join(contenders)}; {BASELINE} always takes part",
    )
    parser.add_argument(
        "--rounds", type=int, default=200, help="at most so many per case, after three for all"
    )
    parser.add_argument(
        "--seconds", type=float, default=12, help="of rounds per case, beside the first three"
    )
    parser.add_argument("--threads", type=int, help="of torch; its own choice unless given")
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="peak memory too"
    )
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare Σg² with the truth"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    if BASELINE not in options.contenders:
        options.contenders.insert(0, BASELINE)
    return options


def measure_case(case: Case, contenders: list[Contender], options: argparse.Namespace) -> list[Row]:
    contenders = [contender for contender in contenders if case.peers or not contender.peer]
    rows = {contender.name: Row(case.title, contender.title) for contender in contenders}
    running = start(case, contenders, rows)
    if options.check:
        check(case, running, rows)
    times = measure({name: r.step for name, r in running.items()}, BASELINE, options.rounds, options.seconds)
    for name in running:
        note_times(rows[name], times[name], times[BASELINE])
    running.clear()
    gc.collect()
    if options.memory:
        for contender in contenders:
            if rows[contender.name].problem is None:
                rows[contender.name].megabytes = peak_megabytes(case, contender)
    return list(rows.values())


def start(case: Case, contenders: list[Contender], rows: Mapping[str, Row]) -> dict[str, Running]:
    """Those that survive a first step; for the others the row says why they did not."""
    running = {}
    for contender in contenders:
        try:
            prepared = contender.prepare(case.problem())
            prepared.step()
            running[contender.name] = prepared
        except Exception as error:
            rows[contender.name].problem = short_reason(error)
    return running


def check(case: Case, running: Mapping[str, Running], rows: Mapping[str, Row]) -> None:
    truth: dict[str, Tensor] | None = None
    for name, contender in running.items():
        if contender.squares is not None:
            truth = truth or true_squares(case.exact_problem())
            rows[name].error = error_of(find_contender(name), case, truth)


def error_of(contender: Contender, case: Case, truth: Mapping[str, Tensor]) -> float:
    try:
        prepared = contender.prepare(case.exact_problem())
        prepared.step()
        return relative_error(prepared.squares() if prepared.squares else {}, truth)
    except Exception:
        return float("nan")


def note_times(row: Row, times: Times, baseline: Times) -> None:
    ratios = times.ratios(baseline)
    row.low, row.ratio, row.high = quartiles(ratios)
    row.milliseconds, row.rounds = 1e3 * times.median_seconds(), len(ratios)


def this_machine() -> dict[str, object]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": credo.kernels.status().instruction_set,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
