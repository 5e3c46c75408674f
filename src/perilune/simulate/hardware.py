"""Times on other machines, computed from the published bandwidth and FLOPs of accelerators ("cards").

A step takes the longer of two times: the time to read weights, keys and values, and the time of its
floating-point operations (the roofline model). These times are not measured, and every output that uses them
says so.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from perilune.errors import RequestError
from perilune.models.card.model_card import ModelCard
from perilune.simulate.step_cost import StepWork
from perilune.simulate.times import PASSES_PER_UPDATE


@dataclass(frozen=True, slots=True)
class Card:
    """Published specifications of an accelerator.

    Attributes:
        bandwidth: bandwidth of the memory, in bytes per second.
        flops: dense bfloat16 operations per second.
        memory: size of the memory in bytes.
        link: bandwidth to other cards of the machine, in bytes per second and direction.
        host: bandwidth to the host's memory, in bytes per second and direction.
    """

    bandwidth: float
    flops: float
    memory: float
    link: float
    host: float


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "A10": Card(600e9, 125e12, 24e9, 32e9, 32e9),
        "A100": Card(2039e9, 312e12, 80e9, 300e9, 32e9),
        "A100-40GB": Card(1555e9, 312e12, 40e9, 300e9, 32e9),
        "B200": Card(8000e9, 2250e12, 180e9, 900e9, 64e9),
        "H100": Card(3350e9, 989e12, 80e9, 450e9, 64e9),
        "H200": Card(4800e9, 989e12, 141e9, 450e9, 64e9),
        "L4": Card(300e9, 121e12, 24e9, 32e9, 32e9),
        "L40S": Card(864e9, 362e12, 48e9, 32e9, 32e9),
        "MI300X": Card(5300e9, 1307e12, 192e9, 448e9, 64e9),
        "RTX4090": Card(1008e9, 165e12, 24e9, 32e9, 32e9),
    }
)
VALUE_BYTES = 2  # bytes of a weight, key or value: bfloat16
TRAINING_BYTES = 16  # per parameter in training: weights, gradient and two moments
ACHIEVED_BANDWIDTH, ACHIEVED_FLOPS, ACHIEVED_TRAINING = 0.7, 0.5, 0.4  # shares of the published values
QUERIES_PER_KEY = 128  # queries of a prompt for which a key is read once
HOST_SECONDS = 1e-3  # time of scheduler and sampler in each step of the engine
EXCHANGE_SECONDS = 1e-5  # latency of an exchange between two cards
USED_MEMORY = 0.9  # share of the memory for weights and cache
DISK_BANDWIDTH = 7e9  # bytes per second: an NVMe disk on four lanes of PCIe 4
NETWORK_BANDWIDTH = 50e9  # bytes per second between machines: 400 Gbit/s
START_SECONDS = 60.0  # to start a stage
RECORD_SECONDS = 0.1  # to record a training step
ANSWER_SECONDS = 1e-4  # to score an answer
ASSUMPTIONS = (
    f"computed from published bandwidth and FLOPs, not measured: {ACHIEVED_BANDWIDTH:.0%} of the bandwidth,"
    f" {ACHIEVED_FLOPS:.0%} of the bfloat16 FLOPs ({ACHIEVED_TRAINING:.0%} in training),"
    f" {1e3 * HOST_SECONDS:g} ms of the host in each engine step, {START_SECONDS:g} s to start a stage"
)
_COUNT, _PRICE = r"[1-9][0-9]{0,6}", r"[0-9]{1,9}(\.[0-9]{1,9})?"
_MACHINES_PATTERN = re.compile(
    rf"(?P<count>{_COUNT})x(?P<card>[\w-]+)(/(?P<each>{_COUNT}))?(@(?P<price>{_PRICE}))?"
)


@dataclass(frozen=True, slots=True)
class Machines:
    """Cards of one kind.

    Attributes:
        name: name of the card.
        count: number of cards.
        cards_per_model: number of cards that share one copy of the model.
        price: price of one card for one hour; None if unknown.
    """

    name: str
    card: Card
    count: int
    cards_per_model: int = 1
    price: float | None = None

    @property
    def replicas(self) -> int:
        """Number of copies of the model."""
        return self.count // self.cards_per_model

    def cost(self, seconds: float) -> float | None:
        """Return the price of all cards for `seconds`."""
        return None if self.price is None else self.price * self.count * seconds / 3600


def parse_machines(text: str) -> Machines:
    """Parse machines such as "8xH100/4@2.5": 8 cards, 4 for each copy of the model, 2.5 per card and hour.

    Raises:
        RequestError: when the text does not have this form, or names an unknown card.
    """
    match = _MACHINES_PATTERN.fullmatch(text)
    if match is None:
        raise RequestError(
            f"{text!r} does not describe machines",
            where="--machines",
            remedy="give COUNTxCARD, such as 2xH100, 8xH100/4 (4 cards hold a model), or 2xH100@2.50 (a price"
            " per card and hour)",
        )
    names = {name.lower(): name for name in CARDS}
    name = names.get(match["card"].lower())
    if name is None:
        raise RequestError(
            f"no published figures for {match['card']!r}",
            where="--machines",
            remedy=f"the cards are {', '.join(CARDS)}",
        )
    count, size = int(match["count"]), int(match["each"] or 1)
    if count % size:
        raise RequestError(
            f"{count} cards cannot be divided by {size}",
            where="--machines",
            remedy="give a multiple of the cards per model",
        )
    return Machines(name, CARDS[name], count, size, float(match["price"]) if match["price"] else None)


class ComputedSteps:
    """Predicts steps of the engine on `machines.cards_per_model` cards that share a model."""

    def __init__(self, machines: Machines, model: ModelCard) -> None:
        card, size = machines.card, machines.cards_per_model
        self._bandwidth = ACHIEVED_BANDWIDTH * card.bandwidth * size
        self._flops = ACHIEVED_FLOPS * card.flops * size
        self._experts = VALUE_BYTES * sum(layer.feed_forward.parameters for layer in model.layers)
        self._dense = VALUE_BYTES * model.parameters - self._experts
        active = VALUE_BYTES * sum(layer.feed_forward.active_parameters for layer in model.layers)
        self._idle = 1 - active / self._experts  # share of the experts that a token does not use
        self._key = model.cache_bytes(1, VALUE_BYTES)
        self._block = model.cache_bytes(16, VALUE_BYTES)
        self._token = 2 * model.active_parameters
        self._attention = sum(layer.mixer.flops(1) for layer in model.layers)
        exchanged = 2 * len(model.layers) if size > 1 else 0  # after attention and feed-forward
        self._reduce = exchanged * EXCHANGE_SECONDS
        self._reduced = exchanged * 2 * (size - 1) / size * VALUE_BYTES * model.hidden_size / card.link

    def step_seconds(self, work: StepWork) -> float:
        """Return the longer of the times to read and to compute, plus the times of host and exchange."""
        tokens = work.rows + work.prefill
        weights = self._dense + self._experts * (1 - self._idle**tokens)
        keys = work.keys + work.prefill_keys
        read = (weights + self._key * (work.keys + work.prefill_keys / QUERIES_PER_KEY)) / self._bandwidth
        computed = (self._token * tokens + self._attention * keys) / self._flops
        return HOST_SECONDS + max(read, computed) + self._reduce + self._reduced * tokens

    def bookkeeping_seconds(self, *, begun: int = 0, copied: int = 0, ended: int = 0) -> float:
        """Return the seconds to copy blocks; samples that begin and end take none."""
        return 2 * copied * self._block / self._bandwidth


@dataclass(frozen=True)
class ComputedTimes:
    """The times of an RL run on other machines.

    Attributes:
        length: mean number of tokens of an episode with its prompt.
        learners: number of cards that train.
    """

    machines: Machines
    model: ModelCard
    length: int
    learners: int

    batch = episode = checks = 0.0
    answer, start = ANSWER_SECONDS, START_SECONDS

    @cached_property
    def step(self) -> ComputedSteps:
        return ComputedSteps(self.machines, self.model)

    def learn(self, tokens: int, episodes: int, pairs: int) -> float:
        """Return the seconds of an update. `tokens` is the number of tokens of one copy of the model."""
        card, model = self.machines.card, self.model
        computed = PASSES_PER_UPDATE * self.forward(tokens, pairs)
        update = TRAINING_BYTES * model.parameters / (ACHIEVED_BANDWIDTH * card.bandwidth * self.learners)
        share = 2 * (self.learners - 1) / self.learners
        return computed + update + share * VALUE_BYTES * model.parameters / card.link

    def forward(self, tokens: int, pairs: int) -> float:
        """Return the seconds of a pass without gradients over episodes of `length` tokens."""
        flops = self.model.training_flops(max(1, self.length)) * tokens / PASSES_PER_UPDATE
        return flops / (ACHIEVED_TRAINING * self.machines.card.flops * self.machines.cards_per_model)

    def record(self, tokens: int, answers: int, episodes: int) -> float:
        return RECORD_SECONDS + self.publish

    @property
    def publish(self) -> float:
        return VALUE_BYTES * self.model.parameters / self.machines.card.link


def cache_tokens(machines: Machines, model: ModelCard) -> int:
    """Return how many tokens fit into the cache next to the weights, for requests of the maximum length.

    Raises:
        RequestError: when the weights do not fit.
    """
    memory, weights = machines.card.memory * machines.cards_per_model, VALUE_BYTES * model.parameters
    room = USED_MEMORY * memory - weights
    longest = model.max_positions
    if room < model.cache_bytes(min(longest, 4096), VALUE_BYTES):
        raise RequestError(
            f"{weights / 1e9:,.0f} GB of weights do not fit {machines.cards_per_model} x {machines.name} with"
            f" {memory / 1e9:,.0f} GB",
            where="--machines",
            remedy=f"use more cards for each copy of the model: {machines.count}x{machines.name}/"
            f"{2 * machines.cards_per_model}",
        )
    return int(room / model.cache_bytes_per_token(longest, VALUE_BYTES))


def transfer_seconds(model: ModelCard, tokens: int) -> float:
    """Return the seconds to send the keys and values of `tokens` to another machine."""
    return model.cache_bytes(tokens, VALUE_BYTES) / NETWORK_BANDWIDTH
