"""Whether what Adam trains, the others train, with only the number of examples given.

    python -m benchmarks.out_of_the_box --data DIR --jobs 2                      every problem, method and seed
    python -m benchmarks.out_of_the_box --data DIR --methods Adam VOGN --series long    those on which Adam overfits
    python -m benchmarks.out_of_the_box --data DIR --series further              those on which no default was chosen
    python -m benchmarks.out_of_the_box --overview --out FILE                    a short table of stored runs

Runs are kept in a JSON-lines file as they end; those that are there already are not run again. DIR has Fashion-MNIST,
CIFAR-10 and the UCI sets (docs/data.md). Scores are on images cut from the training sets, never on the test sets.
"""

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

from benchmarks.out_of_the_box.methods import METHODS
from benchmarks.out_of_the_box.table import overview, table
from benchmarks.out_of_the_box.training import EVERY, one


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--problems", nargs="+", default=None, help="those whose name contains one of these")
    parser.add_argument("--series", default="default", choices=["default", "long", "further"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument(
        "--overview", action="store_true", help="nothing is run: a short table of what there is"
    )
    parser.add_argument("--curve", action="store_true", help="also the NLL after every epoch")
    parser.add_argument("--out", type=Path, default=Path("out_of_the_box.jsonl"))
    options = parser.parse_args()
    chosen = [
        problem.name
        for problem in EVERY
        if problem.series == options.series
        and (options.problems is None or any(part in problem.name for part in options.problems))
    ]
    done = read(options.out)
    if options.overview:
        print(overview([line for m in options.methods for line in done if line["method"] == m]))
        return
    known = {(line["problem"], line["method"], line["seed"]) for line in done}
    wanted = [
        (name, method, seed) for seed in range(options.seeds) for name in chosen for method in options.methods
    ]
    missing = [((key), options.data, options.curve) for key in wanted if key not in known]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool, options.out.open("a") as file:
        for line in pool.imap_unordered(one, missing):
            file.write(json.dumps(line) + "\n")
            file.flush()
            done.append(line)
            print(
                line["problem"], line["method"], line["seed"], line.get("nll", line.get("error")), flush=True
            )
    print(table([line for line in done if (line["problem"], line["method"], line["seed"]) in set(wanted)]))


if __name__ == "__main__":
    main()
