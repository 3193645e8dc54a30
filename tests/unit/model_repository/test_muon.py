"""The optimizer of the sample language model."""

import pytest
import torch
from recipes.muon import Muon


@pytest.mark.parametrize("shape", [(24, 48), (48, 24)])
def test_it_steps_like_torchs_muon(shape: tuple[int, int]) -> None:
    """After three steps the weights differ by what bfloat16, in which torch iterates, rounds away."""
    generator = torch.Generator().manual_seed(0)
    mine, other = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    optimizers = [
        Muon([mine], 0.01),
        torch.optim.Muon([other], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        mine.grad = torch.randn(shape, generator=generator)
        other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(mine, other, atol=0.03 * float(other.detach().abs().max()), rtol=0)
