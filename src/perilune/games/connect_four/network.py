"""The policy and value network, most of whose parameters are used once per position.

A convolution costs its parameters times the number of places; a matrix costs its parameters once. So there is
a single convolution: its 4 x 4 window contains every possible line of four, at 12 places. Matrices combine
its outputs.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from perilune.games.connect_four.board import COLUMNS, PLANES, ROWS, Boards, encode_planes, legal_columns
from perilune.learn import checkpoints

WINDOW = 4
Floats = NDArray[np.float32]
WINDOW_COUNT = (COLUMNS - WINDOW + 1) * (ROWS - WINDOW + 1)


class Network(nn.Module):
    """Logits of the columns and the expected outcome for the player to move.

    Args:
        channels: outputs of the convolution per window.
        hidden: width of the two layers after the convolution.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.lines = nn.Linear(PLANES * WINDOW * WINDOW, channels)
        self.first = nn.Linear(WINDOW_COUNT * channels, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.policy = nn.Linear(hidden, COLUMNS)
        self.value = nn.Linear(hidden, 1)

    def forward(self, planes: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits float32[N, 7] and values float32[N] in (-1, 1) for planes uint8[N, 6, 7, 7].

        Matrix products take bfloat16 and accumulate in float32. Weights stay float32.
        """
        windows = planes[..., :ROWS].unfold(2, WINDOW, 1).unfold(3, WINDOW, 1)  # [N, 6, 4, 3, 4, 4]
        patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(len(planes) * WINDOW_COUNT, -1)
        with torch.autocast(planes.device.type, torch.bfloat16):
            hidden = F.relu(self.lines(patches.to(torch.bfloat16))).view(len(planes), -1)
            hidden = F.relu(self.first(hidden))
            hidden = hidden + F.relu(self.second(hidden))
            logits, value = self.policy(hidden), self.value(hidden)
        return logits.float(), torch.tanh(value.float()).squeeze(1)


def evaluate_boards(network: Network, boards: Boards) -> tuple[Floats, Floats]:
    """Return log-probabilities float32[N, 7], -inf for full columns, and values float32[N]."""
    with torch.inference_mode():
        logits, values = network(torch.from_numpy(encode_planes(boards)))
        return masked_logprobs(logits, torch.from_numpy(legal_columns(boards))).numpy(), values.numpy()


def masked_logprobs(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return log-softmax over the allowed columns; -inf elsewhere."""
    return logits.masked_fill(~allowed, float("-inf")).log_softmax(dim=1)


def save_player(directory: Path, network: Network) -> None:
    weights = {name: p.detach() for name, p in network.named_parameters()}
    shape = {"channels": network.lines.out_features, "hidden": network.second.out_features}
    checkpoints.write(directory, {"weights": weights}, shape)


def load_player(directory: Path) -> Network:
    """Load a network.

    Raises:
        RequestError: if files are missing or damaged.
    """
    tensors, shape = checkpoints.read(directory, ["weights"])
    network = Network(int(shape["channels"]), int(shape["hidden"]))
    checkpoints.copy_into(dict(network.named_parameters()), tensors["weights"], directory)
    return network
