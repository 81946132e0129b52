"""Readings: what is read of the parts is the reading of what the parts write."""

import torch

from interp.compat.transformer_lens.activation_cache import Reading, joined, with_remainder


def test_joined_parts_are_their_concatenation_with_and_without_gradients() -> None:
    parts = [torch.randn(n, 3) for n in (2, 0, 4)]
    for inside in (False, True):
        assert torch.equal(joined(iter(parts), 6, rows_inside=inside), torch.cat(parts))
    parts[0].requires_grad_()
    for inside in (False, True):
        found = joined(iter(parts), 6, rows_inside=inside)
        assert found.requires_grad and torch.equal(found, torch.cat(parts))


def test_a_reading_of_heads_and_neurons_is_the_reading_of_what_they_write() -> None:
    z, w, post, w_in = torch.randn(2, 5, 3, 4), torch.randn(3, 4, 6), torch.randn(2, 5, 7), torch.randn(7, 6)
    reading = Reading(True, torch.rand(2, 5, 1) + 1, torch.randn(6, 2))
    heads = torch.stack([reading(z[:, :, h] @ w[h]) for h in range(3)])
    torch.testing.assert_close(reading.heads(z, w), heads)
    neurons = torch.stack([reading(post[..., n, None] * w_in[n]) for n in range(7)])
    torch.testing.assert_close(reading.neurons(post, w_in), neurons)


def test_products_with_directions_are_those_of_the_vectors_as_read() -> None:
    stack, directions, scale = torch.randn(3, 2, 5, 6), torch.randn(5, 6), torch.rand(2, 5, 1) + 1
    for reading in (Reading(), Reading(True, scale), Reading(False, scale)):
        expected = (reading(stack) * directions).sum(-1)
        torch.testing.assert_close(reading.dots(stack, directions), expected)


def test_rows_and_their_remainder_sum_to_the_whole() -> None:
    rows, whole = torch.randn(4, 3), torch.randn(3)
    for wants_gradient in (False, True):
        rows.requires_grad_(wants_gradient)
        stack = with_remainder(iter(rows.split(2)), whole, 5)
        assert torch.equal(stack[:4], rows) and stack.requires_grad == wants_gradient
        torch.testing.assert_close(stack.sum(0), whole)
    assert torch.equal(with_remainder(iter(()), whole, 1), whole[None])
