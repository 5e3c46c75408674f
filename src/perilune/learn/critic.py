"""A critic: what a state will be worth, read off the decoder's last hidden state by one linear map.

It shares the decoder, so its loss shapes the decoder too; the coefficient in the value weights says how much.
"""

from __future__ import annotations

from torch import Tensor, nn


class Critic(nn.Module):
    """float[M] values of float[M, d] hidden states. Starts at zero: an untaught critic expects nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.head(hidden.float())
        return values[:, 0]
