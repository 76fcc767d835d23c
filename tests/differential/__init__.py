"""Random small programs, and a loop over single examples by plain autograd beside each of them.

`python -m tests.differential --programs 200000 --seed 1` runs as many as one likes;
the suite runs some with fixed seeds.
"""
