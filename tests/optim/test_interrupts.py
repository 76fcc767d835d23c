"""An interrupt may come at any line: it leaves all of a step or nothing, and an optimiser that goes on."""

import sys
from contextlib import suppress
from itertools import count

import pytest
import torch
import torch.nn.functional as F

import credo
from credo.errors import CallOrderError
from credo.kernels import noise, update
from credo.optim.base import Block
from tests.optim.trained import X, Y, assert_unchanged, learned, trained


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_at_the_draw_itself_restores_the_mean(monkeypatch, after):
    """Python is interrupted right before the kernel that puts the mean by, or right after it."""
    model, optimizer = trained()
    before, sample = learned(model, optimizer), noise.sample_all_

    def interrupted(*args, **options):
        if after:
            sample(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(noise, "sample_all_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    assert_unchanged(before, model, optimizer)


class InterruptAt:
    """Interrupts Python before one of the lines of a block's own functions that it comes to."""

    files = (
        "optim/base.py",
        "optim/vogn.py",
        "curvature/intercept.py",
        "curvature/backward_calls.py",
    )
    functions = ("__enter__", "__exit__", "_run_share", "_draw", "_observe", "_give_up", "run")

    def __init__(self, line: int):
        self.left = line

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.look)

    def __exit__(self, *_):
        sys.settrace(self.before)

    def look(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.endswith(self.files):
            return None
        if event == "line" and code.co_name in self.functions:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.look


def by_closure(model, optimizer):
    optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))


def by_blocks(model, optimizer):
    optimizer.zero_grad()
    for _ in range(2):
        with optimizer.sampled():
            F.cross_entropy(model(X), Y).backward()
    optimizer.step()


@pytest.mark.parametrize("step", [by_closure, by_blocks])
def test_an_interrupt_at_any_line_of_a_block_leaves_the_optimizer_usable(step):
    for line in count(1):
        model, optimizer = trained(mc_samples=2)
        before = [p.detach().clone() for p in model.parameters()]
        with suppress(KeyboardInterrupt), InterruptAt(line):
            step(model, optimizer)
            break
        assert all(map(torch.equal, before, model.parameters()))
        assert torch.overrides._get_current_function_mode() is None
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)  # forgets a first sample of two
        step(model, optimizer)
    assert line > 60


def test_a_block_that_was_cut_off_does_not_disturb_a_later_one():
    """A notebook keeps the last traceback, and with it the block, until another takes its place."""
    model, optimizer = trained()
    cut_off = Block(optimizer, None)
    cut_off.__enter__()
    torch._C._pop_torch_function_stack()
    optimizer._backup.restore()  # as the end of a step does
    optimizer._inside = None
    with optimizer.sampled():
        F.cross_entropy(model(X), Y).backward()
        sample, gradients = ([t.clone() for t in row] for row in sampled_rows(model))
        del cut_off
        assert all(map(torch.equal, sample, sampled_rows(model)[0]))
        assert all(map(torch.equal, gradients, sampled_rows(model)[1]))
        with pytest.raises(CallOrderError, match="inside"):
            optimizer.step()
    optimizer.step()
    assert torch.overrides._get_current_function_mode() is None


def sampled_rows(model):
    return [p.detach() for p in model.parameters()], [p.grad for p in model.parameters()]


@pytest.mark.skipif(
    not credo.kernels.status().enabled, reason="the reference is many calls, any of which may be the last"
)
def test_an_interrupt_right_after_the_update_leaves_all_of_it(monkeypatch):
    """Not the new curvature and momentum beside the old mean."""
    results = []
    for interrupted in (False, True):
        model, optimizer = trained()
        if interrupted:
            monkeypatch.setattr(update, "increment_version", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(lambda model=model: F.cross_entropy(model(X), Y, reduction="none"))
        else:
            optimizer.step(lambda model=model: F.cross_entropy(model(X), Y, reduction="none"))
        results.append(
            [p.detach().clone() for p in model.parameters()]
            + [optimizer.state[p][name] for p in model.parameters() for name in ("momentum", "curvature")]
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt
