# %% [markdown]
# # Many processes
#
# Several processes train one network, each on its share of every batch. The program is the same as for one
# process, but for two lines. Here we write it to a file and start it with `torchrun`.

# %%
from pathlib import Path

PROGRAM = """
import torch, torch.nn.functional as F
import credo

torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
share, shares = credo.distributed.data_share()

generator = torch.Generator().manual_seed(0)
x, y = torch.randn(256, 20, generator=generator), torch.randint(0, 3, (256,), generator=generator)
examples = credo.data.Examples(x, y)
batches = credo.data.Batches(examples, 64, shuffle=True, rank=share, world=shares)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
optimizer = credo.VOGN(model, data_size=256, shared_noise=True)  # N counts the whole data set
for epoch in range(3):
    for inputs, targets in batches:

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        loss = optimizer.step(closure)  # on every rank, the same number of steps
posterior = optimizer.posterior()  # together
if torch.distributed.get_rank() == 0:
    print(f"{shares} process(es): loss {loss:.4f}, a weight {posterior.mean['0.weight'][0, 0]:.6f}")
torch.distributed.destroy_process_group()
"""
Path("train_together.py").write_text(PROGRAM)

# %% [markdown]
# In a terminal this is `torchrun --nproc-per-node 2 train_together.py`. `shared_noise=True` gives all
# processes the same weight samples, so that two of them equal one. Without it each draws its own, which is
# less noise for nothing.

# %%
import os
import subprocess
import sys

for processes in (1, 2):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    done = subprocess.run(
        [*command, "train_together.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print(done.stdout.strip() or done.stderr[-2000:])
Path("train_together.py").unlink()

# %% [markdown]
# The two runs agree to rounding: sums and counts of all shares are added up in one message a step. Unequal
# and empty shares are weighted by true counts.
#
# ## More
#
# - `sharded=True` lets each process keep and update its part of the state only.
# - `credo.predict(..., distributed=True)` answers a loader together.
# - `torchrun --nproc-per-node 2 -m credo run RECIPE` runs any recipe this way.
#
# [Many processes](../distributed.md) has the rules and what goes wrong.
