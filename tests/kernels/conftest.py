"""Which folders are for whom."""

import os

# Triton's interpreter is chosen when Triton is imported: these tests run in processes of their own (test_triton.py).
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
