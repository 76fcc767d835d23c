"""Time and memory of credo beside Adam and beside the other libraries: `python -m benchmarks.run`."""
