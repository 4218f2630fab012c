"""Matching pursuit against a loop over targets with least squares."""

import pytest
import torch

from megatron_ext.transfer.matching_pursuit import grown_rows, matching_pursuit


def reference(target, atoms, k):
    """One target in fp64: the atom of the largest cosine, then least squares over all chosen."""
    lengths = atoms.norm(dim=1)
    chosen, residual = [], target
    for _ in range(k):
        scores = (atoms @ residual).abs() / lengths.clamp_min(1e-300)
        scores[chosen] = -1
        chosen.append(int(scores.argmax()))
        weights = torch.linalg.lstsq(atoms[chosen].t(), target[:, None]).solution[:, 0]
        residual = target - weights @ atoms[chosen]
    return chosen, weights


@pytest.mark.parametrize(("count", "width", "k"), [(40, 16, 5), (90, 33, 12)])
def test_atoms_and_weights_are_those_of_least_squares(count, width, k):
    generator = torch.Generator().manual_seed(count)
    scales = torch.rand(count, 1, generator=generator, dtype=torch.float64) * 5 + 0.1
    atoms = torch.randn(count, width, generator=generator, dtype=torch.float64) * scales
    targets = torch.randn(7, width, generator=generator, dtype=torch.float64)
    found = matching_pursuit(targets, atoms, k=k)
    for row, target in enumerate(targets):
        chosen, weights = reference(target, atoms, k)
        assert found.chosen[row].tolist() == chosen
        torch.testing.assert_close(found.weights[row], weights, rtol=1e-4, atol=1e-5)


def test_a_combination_is_found_again_and_long_atoms_do_not_win_by_length():
    generator = torch.Generator().manual_seed(1)
    atoms = torch.randn(30, 64, generator=generator)
    atoms[7] *= 1000.0
    target = (2.0 * atoms[3] - 0.5 * atoms[11])[None]
    found = matching_pursuit(target, atoms, k=2)
    assert set(found.chosen[0].tolist()) == {3, 11}
    rebuilt = (found.weights[0, :, None].float() * atoms[found.chosen[0]]).sum(0)
    torch.testing.assert_close(rebuilt, target[0], rtol=1e-4, atol=1e-4)


def test_atoms_that_add_nothing_weigh_nothing():
    atoms = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0], [0.0, 3.0]])
    found = matching_pursuit(torch.tensor([[4.0, 6.0]]), atoms, k=4)
    rebuilt = (found.weights[0, :, None].float() * atoms[found.chosen[0]]).sum(0)
    assert torch.isfinite(found.weights).all()
    torch.testing.assert_close(rebuilt, torch.tensor([4.0, 6.0]))
    assert sorted(found.chosen[0].tolist()) == [0, 1, 2, 3]


def test_rows_that_grow_far_more_than_others_are_named():
    donor, new = torch.ones(6, 4), 2 * torch.ones(6, 4)
    new[4] *= 50
    ids = torch.arange(1, 6).numpy()
    assert grown_rows(donor, new, ids) == [4]
    assert grown_rows(donor, new, ids[:0]) == []
