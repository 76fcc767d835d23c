"""What `import credo` adds to `import torch`: processor seconds, in new processes, with bytecode.

    python -m benchmarks.importing [processes]

The first process is not counted: it compiles what pip compiles when it installs.
"""

import os
import statistics
import subprocess
import sys

AIM = 0.3
PROBE = """
import time, torch
start = time.process_time()
import credo
print(time.process_time() - start)
"""


def added_seconds() -> float:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env=environment
    )
    return float(probe.stdout)


def main(processes: int = 7) -> None:
    added_seconds()
    seconds = [added_seconds() for _ in range(processes)]
    print(
        f"import credo adds {statistics.median(seconds):.3f} s to import torch "
        f"({min(seconds):.3f} to {max(seconds):.3f} in {processes} processes; must be at most {AIM})"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
