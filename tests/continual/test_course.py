"""The loop: what it measures, and that stopping anywhere and going on changes no bit."""

import pytest
import torch

from credo import metrics
from credo.continual import Coreset, Course, Learner, Point, Task, Variational, annealed, learn
from credo.errors import CallOrderError, InvalidType, InvalidValue
from tests.continual.streams import METHODS, adam, classification, network, vogn, with_heads

LEARNERS = {
    "vogn, fresh": lambda: Variational(network(), vogn),
    "vogn, mean, annealed": lambda: Variational(network(), vogn, start="mean", annealing=annealed(0.1, 0.5)),
    "vogn, coreset": lambda: Variational(network(), vogn, coreset=Coreset(5, steps=3)),
    "vogn, heads": lambda: Variational(with_heads(), vogn, coreset=Coreset(5, "k-center", steps=3)),
    "noisy k-fac": lambda: Variational(network(), METHODS["Noisy K-FAC"], start="mean"),
    "bbb, heads": lambda: Variational(with_heads(), METHODS["BBB"]),
    "ivon, heads": lambda: Variational(with_heads(), METHODS["IVON"]),
    "adam": lambda: Point(network(), adam),
    "joint": lambda: Point(network(), adam, joint=True),
    "joint, heads": lambda: Point(with_heads(), adam, joint=True),
    "ewc": lambda: Point(network(), adam, ewc=10.0),
    "ewc, online, heads": lambda: Point(with_heads(), adam, ewc=10.0, online=0.9, labels="data"),
}


def tasks_for(learner: Learner, tasks: int = 3) -> list[Task]:
    heads = hasattr(learner.model, "heads")
    return [classification(k, head=f"head_{k}" if heads else None) for k in range(tasks)]


def course(name: str) -> Course:
    learner = LEARNERS[name]()
    return Course(learner, tasks_for(learner), epochs=2, batch_size=40, seed=5)


class Stopped(Exception):
    pass


def stop_after(steps: int):
    def watch(course: Course) -> None:
        if course.steps == steps and course.batch:
            raise Stopped

    return watch


@pytest.mark.parametrize(
    ("name", "steps"),  # of 18: three batches, two epochs, three tasks
    [(n, k) for n in LEARNERS for k in (1, 3, 6, 8, 12, 17) if k < 17 or not n.startswith("joint")],
)
def test_resuming_changes_no_bit(name, steps):
    whole = course(name)
    whole.run()
    first = course(name)
    with pytest.raises(Stopped):
        first.run(stop_after(steps))
    second = course(name)
    second.load_state_dict(first.state_dict())
    assert second.run() == whole.matrix
    for one, other in zip(whole.learner.model.parameters(), second.learner.model.parameters(), strict=True):
        assert torch.equal(one, other)
    if isinstance(whole.learner, Variational):
        assert_same(whole.learner.posterior.tensors(), second.learner.posterior.tensors())


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_resuming_between_tasks_and_at_the_end():
    whole = course("vogn, coreset")
    saved = []
    whole.run(lambda c: saved.append(c.state_dict()) if c.batch == 0 else None)
    assert len(saved) == 3  # after each task
    for state in saved:
        again = course("vogn, coreset")
        again.load_state_dict(state)
        assert again.run() == whole.matrix


@pytest.mark.parametrize("name", LEARNERS)
def test_the_matrix_is_what_the_tests_say(name):
    found = course(name)
    matrix = found.run()
    assert [len(row) for row in matrix] == [1, 2, 3]
    for task, value in zip(found.tasks, matrix[-1], strict=True):
        assert metrics.accuracy(found.learner.predict(task), task.test_targets) == value
    assert matrix[0][0] > 0.5


def test_adam_forgets_and_the_others_less():
    def forgotten(learner: Learner) -> float:
        return metrics.forgetting(learn(learner, tasks_for(learner), epochs=15, batch_size=15))

    adams = forgotten(LEARNERS["adam"]())
    assert adams > 0.1
    assert forgotten(LEARNERS["joint"]()) < 0.5 * adams
    assert forgotten(Variational(network(), vogn, start="mean")) < adams
    assert forgotten(Point(network(), adam, ewc=100.0)) < adams


def test_the_learning_rate_follows_the_annealing():
    rates = []
    learner = Point(network(), adam, annealing=annealed(0.01, hold=0.5))

    def watch(course: Course) -> None:
        if course.batch:
            rates.append(learner._optimizer.param_groups[0]["lr"])

    learn(learner, [classification(0)], epochs=4, batch_size=90, watch=watch)
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 1e-3])


def test_the_rate_of_the_precision_falls_with_that_of_the_mean():
    rates = []
    learner = Variational(network(), vogn, annealing=annealed(0.01, hold=0.5))

    def watch(course: Course) -> None:
        if course.batch:
            group = learner._optimizer.param_groups[0]
            rates.append((group["lr"], group["ema_rate"]))

    learn(learner, [classification(0), classification(1)], epochs=4, batch_size=90, watch=watch)
    assert rates == 2 * [pytest.approx((5e-3 * f, 0.1 * f)) for f in (1, 1, 1, 0.1)]


def test_the_global_random_stream_is_left_alone():
    learner = LEARNERS["vogn, heads"]()
    state = torch.get_rng_state()
    learn(learner, tasks_for(learner), epochs=1, batch_size=40)
    assert torch.equal(state, torch.get_rng_state())


def test_another_course_is_refused_and_nothing_changes():
    state = course("adam").state_dict()
    learner = LEARNERS["adam"]()
    other = Course(learner, tasks_for(learner), epochs=3, batch_size=40, seed=5)
    before = [p.clone() for p in learner.model.parameters()]
    with pytest.raises(InvalidValue, match=r"epochs=2.*3"):
        other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_calls_in_the_wrong_order():
    learner, task = LEARNERS["vogn, fresh"](), classification(0)
    with pytest.raises(CallOrderError, match="begin"):
        learner.step(task.inputs, task.targets)
    with pytest.raises(CallOrderError, match="not begun"):
        learner.finish(task)
    with pytest.raises(CallOrderError, match="no posterior"):
        learner.predict(task)
    learner.begin(task)
    with pytest.raises(CallOrderError, match="under way"):
        learner.begin(task)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"tasks": []}, "tasks"),
    ],
)
def test_bad_courses(options, words):
    given = {"tasks": [classification(0)], "epochs": 1, "batch_size": 10, **options}
    with pytest.raises((InvalidValue, InvalidType), match=words):
        Course(LEARNERS["adam"](), **given)


def test_bad_learners():
    with pytest.raises(InvalidValue, match="start"):
        Variational(network(), vogn, start="cold")
    with pytest.raises(InvalidValue, match="kind"):
        Point(network(), adam, kind="ranking")
    with pytest.raises(InvalidValue, match="exclude"):
        Point(network(), adam, joint=True, ewc=1.0)
    with pytest.raises(InvalidType, match="posterior"):
        Variational(network(), vogn, posterior=1.0)
    for precision in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidValue, match="new_precision"):
            Variational(with_heads(), vogn, new_precision=precision)
    for end, hold in ((0.0, 0.0), (1.5, 0.0), (0.1, 1.0), (float("nan"), 0.0)):
        with pytest.raises(InvalidValue, match=r"end|hold"):
            annealed(end, hold)


@pytest.mark.parametrize("size", [90, 91, 1000])
def test_a_coreset_larger_than_its_task_changes_nothing(size):
    model = network()
    learner = Variational(model, vogn, coreset=Coreset(size))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(InvalidValue, match=f"size={size}.*90 examples"):
        learner.begin(classification(0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    learner.coreset = None
    learner.begin(classification(0))


@pytest.mark.parametrize("method", ["random", "k-center"])
def test_a_coreset_and_the_rest_are_the_task(method):
    task = classification(0)
    rest, kept = Coreset(10, method).split(task, torch.Generator().manual_seed(0))
    assert (len(rest), len(kept)) == (80, 10)
    rows = torch.cat([rest.inputs, kept.inputs])
    assert torch.equal(rows.sort(0).values, task.inputs.sort(0).values)
    assert len(kept.inputs.unique(dim=0)) == 10


def test_k_center_covers_the_inputs():
    inputs = torch.tensor([[0.0], [0.1], [0.2], [10.0], [10.1], [5.0]])
    task = Task("line", inputs, torch.zeros(6), inputs, torch.zeros(6))
    _, kept = Coreset(3, "k-center").split(task, torch.Generator().manual_seed(0))
    assert {round(float(value) / 5) for value in kept.inputs} == {0, 1, 2}


def test_tasks_that_cannot_be():
    x = torch.ones(3, 2)
    with pytest.raises(InvalidValue, match=r"\(3, 2\).*\(2,\)"):
        Task("short", x, torch.ones(2), x, torch.ones(3))
    with pytest.raises(InvalidValue, match="test_inputs"):
        Task("empty", x, torch.ones(3), x[:0], torch.ones(0))
    with pytest.raises(InvalidType, match="tensors"):
        Task("list", [1.0], torch.ones(1), x, torch.ones(3))
