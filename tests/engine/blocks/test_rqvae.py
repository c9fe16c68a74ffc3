"""RQ-VAE: the worked example, where gradients go, rotations, channels, depth, pairs, files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from auto_research.blocks.rqvae import (
    RQVAE,
    ResidualQuantizer,
    Rotation,
    RQVAEConfig,
    build_rqvae,
    nearest,
    pair_loss,
)
from auto_research.runtime.errors import ConfigError, CorruptFile


def quantizer_of(*books, beta=0.25) -> ResidualQuantizer:
    quantizer = ResidualQuantizer([len(book) for book in books], len(books[0][0]), beta)
    with torch.no_grad():
        for parameter, book in zip(quantizer.books, books, strict=True):
            parameter.copy_(torch.tensor(book, dtype=torch.float32))
    return quantizer


def small(**changes) -> RQVAEConfig:
    return RQVAEConfig(**({"inputs": (6,), "sizes": (5, 3), "hidden": ((8,),), "width": 4} | changes))


def data(items=40, width=6, seed=0):
    return torch.randn(items, width, generator=torch.Generator().manual_seed(seed))


def ready(config, items=40) -> tuple[RQVAE, list[torch.Tensor]]:
    model = build_rqvae(config, 0)
    inputs = [data(items, width) for width in config.inputs]
    model.start_quantising(inputs, 0)
    return model, inputs


def test_worked_example():
    quantizer = quantizer_of([(0, 0), (1, 1)], [(0, 1), (-1, 0)])
    z = torch.tensor([[1.0, 2.0]], requires_grad=True)
    found = quantizer(z)
    assert found.codes.tolist() == [[1, 0]]
    assert found.vectors.sum(1).tolist() == [[1, 2]]
    assert found.residual.tolist() == [[[1, 2], [0, 1]]]
    assert found.loss.tolist() == [1.25]
    found.loss.sum().backward()
    assert z.grad.tolist() == [[0, 0.5]]
    assert quantizer.books[0].grad.tolist() == [[0, 0], [0, -2]]
    assert quantizer.books[1].grad.tolist() == [[0, 0], [0, 0]]


def test_a_later_commitment_never_moves_an_earlier_book():
    quantizer = quantizer_of([(0, 0), (1, 1)], [(0, 0.5), (-1, 0)])
    z = torch.tensor([[1.0, 2.0]], requires_grad=True)
    quantizer(z).loss.sum().backward()
    # level 2: r_1 = (0, 1), e = (0, .5); its terms reach z, not book 1
    assert quantizer.books[0].grad.tolist() == [[0, 0], [0, -2]]
    assert quantizer.books[1].grad.tolist() == [[0, -1], [0, 0]]
    assert z.grad.tolist() == [[0, 0.25 * 2 * 1 + 0.25 * 2 * 0.5]]


def test_nearest_breaks_ties_by_the_lower_code():
    book = torch.tensor([[1.0], [-1.0], [1.0]])
    assert nearest(torch.tensor([[0.0], [1.0], [-3.0]]), book).tolist() == [0, 0, 1]


def test_reconstruction_passes_straight_through_and_leaves_the_books_alone():
    model, inputs = ready(small())
    z = model.latent(inputs).detach().requires_grad_()
    quantised = model.quantizers[0](z).vectors.sum(1)
    zhat = (z + (quantised - z).detach()).detach().requires_grad_()
    (inputs[0] - model.decode(zhat)[0]).square().sum(1).mean().backward()
    through = z + (quantised - z).detach()
    (inputs[0] - model.decode(through)[0]).square().sum(1).mean().backward()
    assert torch.allclose(z.grad, zhat.grad)
    assert z.grad.abs().sum() > 0
    model.zero_grad(set_to_none=True)
    model.losses(inputs)["reconstruction"].backward()
    assert all(book.grad is None for book in model.quantizers[0].books)
    assert model.encoders[0][0].weight.grad.abs().sum() > 0


def test_the_loss_is_the_formula():
    model, inputs = ready(small(beta=0.5))
    x = inputs[0]
    z = model.encoders[0](x)
    residual, zhat, expected = z, torch.zeros_like(z), 0
    for book in model.quantizers[0].books:
        entry = book[((residual[:, None] - book[None]) ** 2).sum(2).argmin(1)]
        expected = expected + 1.5 * ((residual - entry) ** 2).sum(1).mean()
        zhat, residual = zhat + entry, residual - entry
    error = ((x - model.decoders[0](zhat)) ** 2).sum(1).mean()
    terms = model.losses(inputs)
    assert terms["quantisation"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert terms["reconstruction"].item() == pytest.approx(error.item(), rel=1e-5)
    assert terms["loss"].item() == pytest.approx((expected + error).item(), rel=1e-5)


def test_before_quantising_it_is_an_autoencoder():
    model = build_rqvae(small(channels=2, rotation="householder"), 0)
    inputs = [data()]
    assert not model.quantising
    terms = model.losses(inputs)
    plain = model.decoders[0](model.encoders[0](inputs[0]))
    assert terms["quantisation"] == 0
    assert terms["reconstruction"].item() == pytest.approx((inputs[0] - plain).square().sum(1).mean().item(), rel=1e-5)


def test_codes_are_nearest_entries_and_depend_on_the_books():
    model, inputs = ready(small())
    codes = model.codes(inputs)[0]
    z = model.latent(inputs).detach().numpy()
    for level, book in enumerate(model.books()[0]):
        assert (((z[:, None] - book[None]) ** 2).sum(2).argmin(1) == codes[:, level].numpy()).all()
        z = z - book[codes[:, level]]
    with torch.no_grad():
        model.quantizers[0].books[0].copy_(model.quantizers[0].books[0].flip(0))
    assert torch.equal(model.codes(inputs)[0][:, 0], 4 - codes[:, 0])


def test_unused_entries_move_to_current_residuals():
    quantizer = quantizer_of([(0, 0), (9, 9), (50, 50)], [(0, 0), (70, 70)])
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 9.0], [9.0, 8.0]])
    before = quantizer.books[0].detach().clone()
    moved = quantizer.reset_unused(z, np.random.default_rng(0))
    assert moved[0] == 1
    assert torch.equal(quantizer.books[0][:2], before[:2])
    assert quantizer.books[0][2].tolist() in z.tolist()
    assert moved[1] == 1
    residual = z - quantizer.books[0][nearest(z, quantizer.books[0])]
    assert any(torch.equal(quantizer.books[1][1], row) for row in residual)
    assert quantizer.reset_unused(z, np.random.default_rng(0))[0] == 0


def test_rotation_is_orthogonal_with_determinant_one_and_invertible():
    torch.manual_seed(0)
    rotation = Rotation(64, 8, learned=True)
    matrix = rotation(torch.eye(64)).t()
    assert (matrix.t() @ matrix - torch.eye(64)).abs().max() < 1e-5
    assert torch.linalg.det(matrix.detach()).item() == pytest.approx(1, abs=1e-4)
    product = torch.eye(64)
    for v in rotation.v.detach():
        product = product @ (torch.eye(64) - 2 * torch.outer(v, v) / (v @ v))
    assert torch.allclose(matrix, product, atol=1e-5)
    z = torch.randn(7, 64)
    assert torch.allclose(rotation(z).norm(dim=1), z.norm(dim=1), rtol=1e-5)
    assert torch.allclose(rotation.inverse(rotation(z)), z, atol=1e-5)


def test_rotation_is_float32_under_low_precision():
    rotation = Rotation(64, 8, learned=True)
    with torch.autocast("cpu", torch.bfloat16):
        matrix = rotation(torch.eye(64))
    assert (matrix @ matrix.t() - torch.eye(64)).abs().max() < 1e-5


def test_every_reflection_is_learned_and_a_random_rotation_is_not():
    model, inputs = ready(small(channels=2, rotation="householder"))
    model.losses(inputs)["loss"].backward()
    assert (model.rotation.v.grad.abs().sum(1) > 0).all()
    fixed, inputs = ready(small(channels=2, rotation="random"))
    fixed.losses(inputs)["loss"].backward()
    assert fixed.rotation.v.grad is None


def test_rotation_stays_orthogonal_while_it_is_trained():
    model, inputs = ready(small(channels=2, rotation="householder"))
    before = model.rotation.v.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        model.losses(inputs)["loss"].backward()
        optimizer.step()
    matrix = model.rotation(torch.eye(4))
    assert (matrix @ matrix.t() - torch.eye(4)).abs().max() < 1e-5
    assert (model.rotation.v - before).abs().max() > 0.1


def test_channels_code_their_own_part():
    model, inputs = ready(small(channels=2))
    first, second = model.codes(inputs)
    z = model.latent(inputs)
    assert torch.equal(first, model.quantizers[0](z[:, :2]).codes)
    assert torch.equal(second, model.quantizers[1](z[:, 2:]).codes)
    assert [[book.shape for book in books] for books in model.books()] == [[(5, 2), (3, 2)]] * 2


def test_depth_hides_later_levels_from_the_decoder_only():
    model, inputs = ready(small(sizes=(5, 3, 2), progressive=True))
    depth = torch.ones(40, dtype=torch.int64)
    before = model.losses(inputs, depth=depth)
    first = model.quantizers[0](model.latent(inputs)).vectors[:, 0]
    error = (inputs[0] - model.decode(first)[0]).square().sum(1).mean()
    assert before["reconstruction"].item() == pytest.approx(error.item(), rel=1e-5)
    with torch.no_grad():
        model.quantizers[0].books[1] += 0.3
        model.quantizers[0].books[2] -= 0.3
    after = model.losses(inputs, depth=depth)
    assert after["reconstruction"] == before["reconstruction"]
    assert after["quantisation"] != before["quantisation"]
    full = torch.full((40,), 3)
    assert model.losses(inputs, depth=full)["loss"] == model.losses(inputs)["loss"]


def test_modalities_are_fused_and_reconstructed_separately():
    model, inputs = ready(small(inputs=(6, 3), hidden=((8,), ()), fuse=(7,)))
    assert [tuple(layer.weight.shape) for layer in model.fuse if isinstance(layer, nn.Linear)] == [(7, 8), (4, 7)]
    assert [out.shape[1] for out in model.decode(torch.zeros(1, 4))] == [6, 3]
    z = model.latent(inputs)
    assert not torch.equal(model.latent([inputs[0], inputs[1] + 1]), z)
    assert not torch.equal(model.latent([inputs[0] + 1, inputs[1]]), z)
    whole = model.losses(inputs)["reconstruction"].item()
    found = model.quantizers[0](z).vectors.sum(1)
    parts = [(x - out).square().sum(1).mean().item() for x, out in zip(inputs, model.decode(found), strict=True)]
    assert whole == pytest.approx(sum(parts), rel=1e-5)


def test_pair_loss_of_orthogonal_pairs():
    eye = torch.eye(2)
    items = torch.tensor([[0, 1], [2, 3]])
    assert pair_loss(eye, eye, items, 1.0).item() == pytest.approx(0.313262, abs=1e-6)
    assert pair_loss(eye * 7, eye, items, 0.1).item() == pytest.approx(4.54e-5, rel=1e-3)


def test_equal_items_are_no_negatives():
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    same = torch.tensor([[0, 1], [0, 1], [0, 1]])
    assert pair_loss(vectors, vectors, same, 0.1).item() == 0
    # pair 1's second item (0) is the first one of pair 0: masked forward in row 0, backward in row 1
    items = torch.tensor([[0, 1], [2, 0], [4, 5]])
    first = torch.nn.functional.normalize(data(3, 4, seed=1))
    second = torch.nn.functional.normalize(data(3, 4, seed=2))
    scores = first @ second.t()
    rows = [scores[0, [0, 2]], scores[1], scores[2]]
    columns = [scores[:, 0], scores[[1, 2], 1], scores[:, 2]]
    forward = sum(torch.logsumexp(row, 0) - scores[i, i] for i, row in enumerate(rows)) / 3
    backward = sum(torch.logsumexp(column, 0) - scores[i, i] for i, column in enumerate(columns)) / 3
    loss = pair_loss(first, second, items, 1.0).item()
    assert loss == pytest.approx(((forward + backward) / 2).item(), rel=1e-5)


def test_pairs_add_their_term_and_change_nothing_else():
    model, inputs = ready(small(pair_weight=0.5))
    pairs = torch.tensor([[3, 4], [5, 6], [7, 3]])
    rows = torch.cat([torch.arange(40), pairs[:, 0], pairs[:, 1]])
    terms = model.losses([inputs[0][rows]], pairs=pairs)
    alone = model.losses(inputs)
    assert terms["reconstruction"].item() == pytest.approx(alone["reconstruction"].item(), rel=1e-5)
    assert terms["quantisation"].item() == pytest.approx(alone["quantisation"].item(), rel=1e-5)
    assert terms["loss"].item() == pytest.approx((alone["loss"] + 0.5 * terms["pairs"]).item(), rel=1e-5)
    model.zero_grad(set_to_none=True)
    terms["pairs"].backward()
    assert model.encoders[0][0].weight.grad.abs().sum() > 0  # through the straight-through path
    assert all(book.grad is None for book in model.quantizers[0].books)


def test_initialisation_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second, other = build_rqvae(small(), 1), build_rqvae(small(), 1), build_rqvae(small(), 2)
    assert torch.rand(1) == expected
    assert torch.equal(first.encoders[0][0].weight, second.encoders[0][0].weight)
    assert not torch.equal(first.encoders[0][0].weight, other.encoders[0][0].weight)


def test_saved_models_give_the_same_codes(tmp_path):
    model, inputs = ready(small(channels=2, rotation="householder"))
    model.save(tmp_path)
    loaded = RQVAE.load(tmp_path)
    assert loaded.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(loaded.codes(inputs), model.codes(inputs), strict=True))
    (tmp_path / "rqvae.safetensors").unlink()
    with pytest.raises(CorruptFile):
        RQVAE.load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"sizes": ()}, {"channels": 3}, {"rotation": "half"}, {"activation": "tanh"}, {"hidden": ((8,), (8,))}],
)
def test_wrong_configurations_are_refused(changes):
    with pytest.raises(ConfigError):
        small(**changes)
