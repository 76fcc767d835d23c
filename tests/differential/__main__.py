"""`python -m tests.differential --programs 200000 --seed 1`: prints failures, and how many programs were taken."""

import argparse
import sys
import time
import warnings
from collections import Counter

from tests.differential.check import Failure, run
from tests.differential.program import draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument(
        "--optimisers", type=int, default=3, help="every so many programs, also the steps of an optimiser"
    )
    parser.add_argument("--stop", type=int, default=20, help="after so many failures")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    became: Counter[str] = Counter()
    begun = time.perf_counter()
    for seed in range(options.seed, options.seed + options.programs):
        program = draw(seed)
        try:
            became[run(program, seed % options.optimisers == 0)] += 1
            became["should be right"] += program.right
        except Failure as failure:
            became["FAILED"] += 1
            print(failure, flush=True)
            if became["FAILED"] >= options.stop:
                break
    print(dict(became), f"{time.perf_counter() - begun:.0f} s")
    return int(became["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
