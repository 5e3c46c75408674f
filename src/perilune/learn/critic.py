"""A critic: one linear map from the decoder's last hidden state to the value of the state.

The critic's loss also trains the decoder, scaled by the coefficient in the value weights.
"""

from torch import Tensor, nn


class Critic(nn.Module):
    """Maps hidden states float[M, d] to values float[M]. All weights start at 0, and so do the values."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.head(hidden.float())
        return values[:, 0]
