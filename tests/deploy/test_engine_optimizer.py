"""AdamW against steps computed by hand and against torch's own."""

import pytest
import torch

from deploy.local_service.optimizer import AdamW, AdamWConfig
from evidence.errors import InputError


def test_first_step_moves_by_the_learning_rate():
    """After one step m/(1-b1) = g and v/(1-b2) = g^2, so each parameter moves by lr * g / |g|."""
    parameters = torch.tensor([1.0, 1.0, 1.0])
    optimizer = AdamW(3)
    config = AdamWConfig(learning_rate=0.1, eps=0.0)
    metrics = optimizer.step(parameters, torch.tensor([3.0, -4.0, 0.0]), config)
    assert parameters.tolist() == pytest.approx([0.9, 1.1, 1.0])
    assert metrics == {"grad_norm": 5.0, "clip_scale": 1.0}
    assert optimizer.steps == 1


def test_weight_decay_shrinks_parameters_apart_from_the_gradient():
    """1 * (1 - 0.1 * 0.5) = 0.95 with a zero gradient."""
    parameters = torch.tensor([1.0])
    AdamW(1).step(parameters, torch.zeros(1), AdamWConfig(learning_rate=0.1, weight_decay=0.5))
    assert parameters.tolist() == pytest.approx([0.95])


def test_long_gradient_is_shortened_to_the_limit():
    """Norm 5 with limit 1: the moments see g / 5."""
    optimizer = AdamW(2)
    config = AdamWConfig(grad_clip_norm=1.0, beta1=0.5)
    metrics = optimizer.step(torch.zeros(2), torch.tensor([3.0, 4.0]), config)
    assert metrics["grad_norm"] == 5.0
    assert metrics["clip_scale"] == pytest.approx(0.2)
    assert optimizer.first.tolist() == pytest.approx([0.3, 0.4])


def test_short_gradient_is_left_as_it_is():
    metrics = AdamW(1).step(torch.zeros(1), torch.ones(1), AdamWConfig(grad_clip_norm=1.0))
    assert metrics["clip_scale"] == 1.0


def test_many_steps_agree_with_torch():
    torch.manual_seed(0)
    ours, optimizer = torch.randn(20), AdamW(20)
    theirs = torch.nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    config = AdamWConfig(learning_rate=0.01, eps=1e-8, weight_decay=0.1)
    for _ in range(10):
        gradient = torch.randn(20)
        optimizer.step(ours, gradient, config)
        theirs.grad = gradient
        reference.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_gradient_that_is_not_finite_changes_nothing():
    parameters, optimizer = torch.ones(2), AdamW(2)
    before = optimizer.sha256()
    with pytest.raises(InputError, match=r"gradient: expected a finite norm.*nan"):
        optimizer.step(parameters, torch.tensor([1.0, float("nan")]), AdamWConfig())
    assert parameters.tolist() == [1.0, 1.0]
    assert optimizer.sha256() == before


def test_digest_tells_states_apart():
    optimizer = AdamW(2)
    fresh = optimizer.sha256()
    optimizer.step(torch.zeros(2), torch.zeros(2), AdamWConfig())
    assert optimizer.sha256() != fresh


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", -1.0), ("beta1", 1.0), ("eps", float("nan")), ("grad_clip_norm", -0.1)],
)
def test_unusable_settings_are_refused(name, value):
    with pytest.raises(InputError, match=f"adam_params.{name}"):
        AdamWConfig(**{name: value})
