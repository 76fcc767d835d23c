"""The fused update against the four lines of the algorithm."""

import pytest
import torch

from credo.kernels import forced, update
from credo.kernels.native import available
from credo.kernels.tensors import Backup
from credo.optim.vogn import averaged_update, vogn_update

SETTINGS = {
    "lr": 0.05,
    "beta1": 0.9,
    "beta2": 0.2,
    "damping": 0.01,
    "gradient_scale": 0.5,
    "squares_scale": 0.125,
}
SHAPES = [(), (1,), (63,), (4, 16), (0, 3), (7, 5, 3, 3), (301, 97)]


def operands(shape: tuple[int, ...], dtype=torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """μ, m, s, gradient, squares, prior, prior mean."""
    generator = torch.Generator().manual_seed(seed)
    signed = [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(4)]
    positive = [torch.rand(shape, dtype=dtype, generator=generator) for _ in range(3)]
    return [signed[0], signed[1], positive[0], signed[2], positive[1], positive[2], signed[3]]


def away(origins: list[torch.Tensor]) -> Backup:
    """As a draw leaves them."""
    backup = Backup(origins)
    backup.done.value = 1
    return backup


def vogn_all_(*rows_prior_and_numbers, backup=None, check=False) -> bool:
    return update.vogn_(averaged_update, *rows_prior_and_numbers, backup=backup, check=check)


def vogn_(*tensors, prior, prior_mean, **settings) -> None:
    priors = [prior] if isinstance(prior, torch.Tensor) else prior
    prior_means = None if prior_mean is None else [prior_mean]
    vogn_all_(*([tensor] for tensor in tensors), priors, prior_means, update.VOGNNumbers(**settings))


def algorithm(mu, m, s, gradient, squares, prior, prior_mean, **changes):
    settings = SETTINGS | changes
    g, h = settings["gradient_scale"] * gradient, settings["squares_scale"] * squares
    m = settings["beta1"] * m + g + prior * (mu - prior_mean)
    s = (1 - settings["beta2"]) * s + settings["beta2"] * h
    return mu - settings["lr"] * m / (s + prior + settings["damping"]), m, s


@pytest.mark.parametrize("with_mean", [False, True])
def test_the_reference_is_the_algorithm_box(with_mean):
    mu, m, s, gradient, squares, prior, prior_mean = operands((7, 5))
    settings = {name: SETTINGS[name] for name in ("lr", "beta1", "beta2", "damping")}
    found = vogn_update(
        *(mu, m, s, SETTINGS["gradient_scale"] * gradient, SETTINGS["squares_scale"] * squares),
        prior=prior,
        prior_mean=prior_mean if with_mean else None,
        **settings,
    )
    expected = algorithm(mu, m, s, gradient, squares, prior, prior_mean if with_mean else 0)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("prior_tensor", [False, True])
@pytest.mark.parametrize("with_mean", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_the_update_is_the_algorithm(both_kernels, shape, prior_tensor, with_mean, dtype, tolerance):
    *tensors, prior, prior_mean = operands(shape, dtype)
    chosen = prior if prior_tensor else 0.3
    expected = algorithm(*tensors, chosen, prior_mean if with_mean else 0)
    inputs = [tensor.clone() for tensor in tensors[3:]]
    vogn_(*tensors, prior=chosen, prior_mean=prior_mean if with_mean else None, **SETTINGS)
    for found, wanted in zip(tensors[:3], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(now, before) for now, before in zip(tensors[3:], inputs, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"beta1": 0.0},
        {"beta2": 1.0},
        {"gradient_scale": 1.0, "squares_scale": 256.0},
        {"gradient_scale": 2.0**-16, "squares_scale": 2.0**-32},  # of a loss that is scaled by as much
        {"gradient_scale": 2.0**-50, "squares_scale": 2.0**-100},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["at home", "apart"])
def test_numbers_at_their_ends(both_kernels, changes, dtype, apart):
    """Numbers and sums that are worth the same before their scales: a small scale must not lose digits."""
    mu, m, s, gradient, squares, _, _ = operands((301, 97), dtype)
    settings = SETTINGS | changes
    gradient, squares = gradient / settings["gradient_scale"], squares / settings["squares_scale"]
    exact = algorithm(*[t.double() for t in (mu, m, s, gradient, squares)], 0.3, 0, **changes)
    rows, origins = [[t.clone()] for t in (mu, m, s, gradient, squares)], [mu.clone()] if apart else None
    if apart:
        rows[0][0].fill_(torch.nan)
    vogn_all_(*rows, 0.3, None, update.VOGNNumbers(**settings), backup=origins and away(origins))
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]
    for found, wanted in zip(rows[:3], exact, strict=True):
        torch.testing.assert_close(found[0].double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(rows[3][0], gradient)
    assert torch.equal(rows[4][0], squares)


def test_the_reference_writes_to_nothing_but_means_momenta_and_curvatures():
    """Who has a graph of the gradients would be told of a change, and means at home need not come back."""
    *rows, prior, prior_mean = [[tensor] for tensor in operands((301, 97), torch.float32)]
    versions = [row[0]._version for row in (*rows[3:], prior, prior_mean)]
    with forced("off"):
        assert vogn_all_(*rows, prior, prior_mean, update.VOGNNumbers(**SETTINGS), check=True)
        assert vogn_all_(*rows, 0.3, None, update.VOGNNumbers(**SETTINGS), check=True)
    assert [row[0]._version for row in (*rows[3:], prior, prior_mean)] == versions


def test_the_reference_refuses_squares_of_another_size():
    """Instead of reading beyond them."""
    rows = [[tensor] for tensor in operands((301, 97), torch.float32)[:5]]
    rows[4] = [rows[4][0][:300]]
    with forced("off"), pytest.raises(RuntimeError, match="size"):
        vogn_all_(*rows, 0.3, None, update.VOGNNumbers(**SETTINGS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_means_that_are_kept_elsewhere_are_the_same_update(both_kernels, dtype):
    """bfloat16 has no kernel: the reference then, whatever is chosen."""
    at_home = [[tensor.to(dtype)] for tensor in operands((301, 97))]
    apart = [[tensor.clone() for tensor in row] for row in at_home]
    origins, apart[0][0][:] = (
        [apart[0][0].clone()],
        torch.nan,
    )  # what stands where the mean will be must not matter
    before = origins[0].clone()
    vogn_all_(*at_home, update.VOGNNumbers(**SETTINGS))
    backup = away(origins)
    vogn_all_(*apart, update.VOGNNumbers(**SETTINGS), backup=backup)
    assert not backup.taken
    for one, other in zip(at_home, apart, strict=True):
        assert torch.equal(one[0], other[0])
    assert torch.equal(origins[0], before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("row", [3, 4], ids=["gradients", "squares"])
@pytest.mark.parametrize("place", [(0, 5), (1, 0), (1, 40_002), (2, 62)], ids=str)
def test_a_checked_update_is_the_same_or_none(both_kernels, threads, row, place):
    rows = [list(row) for row in zip(*(operands((n,), seed=n) for n in (7, 40_003, 63)), strict=True)]
    plain = [[tensor.clone() for tensor in row] for row in rows]
    checked = [[tensor.clone() for tensor in row] for row in rows]
    before, numbers = torch.get_num_threads(), update.VOGNNumbers(**SETTINGS)
    try:
        torch.set_num_threads(threads)
        assert vogn_all_(*plain, numbers)
        assert vogn_all_(*checked, numbers, check=True)
        assert all(
            torch.equal(a, b)
            for one, other in zip(plain, checked, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        rows[row][place[0]][place[1]] = float("nan")
        spoilt = [[tensor.clone() for tensor in row] for row in rows]
        assert not vogn_all_(*spoilt, numbers, check=True)
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(a, b)
        for one, other in zip(rows[:3], spoilt[:3], strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_checked_update_knows_infinite_from_large(both_kernels, dtype):
    """Of which the products are none or infinite."""
    rows = [[tensor] for tensor in operands((301, 97), dtype)[:5]]
    numbers, large = update.VOGNNumbers(**SETTINGS), torch.finfo(dtype).max / 1e3
    rows[3][0][5, 5], rows[4][0][5, 5] = large, large
    assert vogn_all_(*rows, 0.3, None, numbers, check=True)
    for row, other, bad in [(3, 4, float("inf")), (3, 4, float("-inf")), (4, 3, float("inf"))]:
        spoilt = [[tensor.clone() for tensor in own] for own in rows]
        spoilt[row][0][7, 7], spoilt[other][0][7, 7] = bad, 0.0
        assert not vogn_all_(*spoilt, 0.3, None, numbers, check=True)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(spoilt[:3], rows[:3], strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_list_is_its_tensors_one_by_one(both_kernels, dtype):
    alone = [operands(shape, dtype, seed=k) for k, shape in enumerate(SHAPES)]
    together = [[tensor.clone() for tensor in row] for row in zip(*alone, strict=True)]
    vogn_all_(*together, update.VOGNNumbers(**SETTINGS))
    for *tensors, prior, prior_mean in alone:
        vogn_(*tensors, prior=prior, prior_mean=prior_mean, **SETTINGS)
    for k in range(3):
        assert all(torch.equal(one[k], other) for one, other in zip(alone, together[k], strict=True))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("apart", [False, True], ids=["at home", "apart"])
@pytest.mark.parametrize("optional", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_cut_into_pieces_it_is_the_algorithm(monkeypatch, optional, apart, layout, dtype):
    """Pieces that end inside tensors, and tensors that end inside pieces."""
    monkeypatch.setattr(update, "TOGETHER", 100)
    shapes = [(3, 4, 5, 2), (0, 3, 1, 1), (7, 5, 3, 3), (1, 1, 1, 1)]
    alone = [operands(shape, dtype, seed=k) for k, shape in enumerate(shapes)]
    expected = [
        algorithm(*t, prior if optional[0] else 0.3, mean if optional[1] else 0) for *t, prior, mean in alone
    ]
    rows = [[t.clone(memory_format=layout) for t in row] for row in zip(*alone, strict=True)]
    priors, prior_means = rows[5] if optional[0] else 0.3, rows[6] if optional[1] else None
    origins = [mean.clone() for mean in rows[0]] if apart else None
    for mean in rows[0] if apart else ():
        mean.fill_(torch.nan)  # what stands where the mean will be must not matter
    with forced("off"):
        vogn_all_(
            *rows[:5], priors, prior_means, update.VOGNNumbers(**SETTINGS), backup=origins and away(origins)
        )
    for k in range(3):
        for found, wanted in zip(rows[k], (each[k] for each in expected), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("where", available())
def test_the_number_of_threads_changes_nothing(where):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            *tensors, _, _ = operands((40_003,), torch.float32)
            with forced(where):
                vogn_(*tensors, prior=0.3, prior_mean=None, **SETTINGS)
            results.append(tensors)
    finally:
        torch.set_num_threads(before)
    for tensors in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(tensors, results[0], strict=True))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_layouts_in_memory_do_not_mix_up_elements(both_kernels, mixed, dtype):
    *tensors, _, _ = operands((8, 6, 3, 3), dtype)
    expected = algorithm(*tensors, 0.3, 0)
    for k in (0, 1, 2) if mixed else range(5):
        tensors[k] = tensors[k].to(memory_format=torch.channels_last)
    vogn_(*tensors, prior=0.3, prior_mean=None, **SETTINGS)
    for found, wanted in zip(tensors[:3], expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_half_precision_means_keep_float32_state(both_kernels):
    *tensors, _, _ = operands((100,), torch.float32)
    tensors[0], tensors[3] = tensors[0].bfloat16(), tensors[3].bfloat16()
    expected = algorithm(*(tensor.float() for tensor in tensors), 0.3, 0)
    vogn_(*tensors, prior=0.3, prior_mean=None, **SETTINGS)
    for found, wanted in zip(tensors[:3], expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)


def test_parameters_with_gradients_are_updated_and_autograd_sees_it(both_kernels):
    mean = torch.nn.Parameter(torch.ones(10))
    loss = (mean**2).sum()
    vogn_(mean, *(torch.ones(10) for _ in range(4)), prior=0.3, prior_mean=None, **SETTINGS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("chosen", available())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "not aligned"])
def test_means_that_are_written_past_the_caches(chosen, dtype, first):
    """So they are in large networks, tile by tile; in pieces that are too few for it the numbers are the same."""
    size, settings = (1 << 20) + 100, update.VOGNNumbers(**SETTINGS)
    whole = [tensor[first:] for tensor in operands((size,), dtype)[:5]]
    origin, expected = whole[0].clone(), [tensor.clone() for tensor in whole]
    whole[0].fill_(torch.nan)
    with forced(chosen):
        vogn_all_(*[[tensor] for tensor in whole], 0.3, None, settings, backup=away([origin]))
        for begin in range(0, size, 1 << 18):
            pieces = [[tensor[begin : begin + (1 << 18)]] for tensor in expected]
            vogn_all_(*pieces, 0.3, None, settings)
    assert all(torch.equal(found, wanted) for found, wanted in zip(whole, expected, strict=True))


@pytest.mark.skipif(not available(), reason="the kernels were not built")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_kernel_moves_iterates_as_the_reference_does(dtype):
    """The mean is an average, w = 0.4; the reference is what runs without kernels."""
    results = []
    for where in (*available()[-1:], "off"):
        rows = [[tensor] for tensor in operands((301, 97), dtype)[:5]]
        offsets, numbers = [0.1 * rows[3][0]], update.VOGNNumbers(**SETTINGS, weight=0.4)
        with forced(where):
            assert update.vogn_(averaged_update, *rows, 0.3, None, numbers, offsets)
        results.append([row[0] for row in (*rows[:3], offsets)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)
