"""Rules that judge the loss and the entropy of a run."""

from collections.abc import Iterator
from itertools import pairwise

from perilune.metrics.health.evidence import SOLVED_PASS_RATE, Evidence, Finding
from perilune.metrics.health.series import BASELINE_STEPS, CENTRE_STEPS, Values, latest, median

CHOSEN_COLLAPSE_STEPS = 5  # consecutive steps, because one batch may look like a collapse by chance
MIN_ANSWER_ENTROPY = 0.25  # nats per answer, below which 93% or more of the answers to a task are the same
MIN_ENTROPY_SHARE = 0.1  # of the entropy at the start
LOSS_WINDOW_STEPS = 5  # steps of a median of the loss, so that two bad batches change nothing
MIN_LOSS_RISE = 0.5  # nats per token
MIN_LOSS_RISE_SHARE = 0.25  # of the lowest median
MIN_LOSS_RISE_NOISES = 6.0  # median differences of successive losses
LOWER_LR = "lower lr or increase warmup, and continue from an earlier checkpoint"


def find_undefined_loss(run: Evidence) -> Iterator[Finding]:
    """Find a loss that is NaN or infinite."""
    since: int | None = None
    for step, flag in zip(run.metrics.steps, run.metrics.undefined("loss"), strict=True):
        since = (since or step) if flag else None
    if since is not None:
        yield Finding("undefined loss", "broken", since, "the loss is NaN or infinite", f"stop: {LOWER_LR}")


def find_diverging_loss(run: Evidence) -> Iterator[Finding]:
    """Find a loss of supervised fine-tuning that is far above its lowest value. Other losses may rise."""
    metrics = run.metrics
    if any(latest(metrics.column(name)) is not None for name in ("reward", "accuracy", "on_policy")):
        return
    pairs = zip(metrics.steps, metrics.column("loss"), strict=True)
    losses = [(step, value) for step, value in pairs if value is not None]
    values = [value for _, value in losses]
    levels = [
        sorted(values[end - LOSS_WINDOW_STEPS : end])[LOSS_WINDOW_STEPS // 2]
        for end in range(LOSS_WINDOW_STEPS, len(values) + 1)
    ]
    if not levels:
        return
    lowest = min(range(len(levels)), key=levels.__getitem__)
    best = levels[lowest]
    before = values[: max(lowest + LOSS_WINDOW_STEPS, BASELINE_STEPS)]
    noise = median([abs(after - value) for value, after in pairwise(before)]) or 0.0
    rise = max(MIN_LOSS_RISE, MIN_LOSS_RISE_SHARE * best, MIN_LOSS_RISE_NOISES * noise)
    high = 0
    while levels[-1 - high] - best >= rise:  # ends at the lowest level
        high += 1
    if high:
        since = losses[len(losses) - high - LOSS_WINDOW_STEPS // 2][0]
        yield Finding(
            "diverging loss",
            "broken",
            since,
            f"the loss rose from {best:.3g} to {levels[-1]:.3g} nats per token",
            LOWER_LR,
        )


def find_entropy_collapse(run: Evidence) -> Iterator[Finding]:
    """Find a policy that gives nearly always the same answer to a task, although many answers are wrong.

    Self-play is left out: the best policy of a game may be deterministic.
    """
    metrics = run.metrics
    if latest(metrics.column("openings")) is not None:
        return
    entropy, passed = metrics.column("entropy"), metrics.column("pass_rate")
    usual = median(entropy[:BASELINE_STEPS]) or 0.0
    per_answer = [
        None if value is None or tokens is None else value * tokens
        for value, tokens in zip(entropy, metrics.column("length"), strict=True)
    ]
    flags = [
        answer is not None
        and answer < MIN_ANSWER_ENTROPY
        and (entropy[index] or 0.0) < MIN_ENTROPY_SHARE * usual
        and not _is_solved(passed[max(0, index + 1 - CENTRE_STEPS) : index + 1])
        for index, answer in enumerate(per_answer)
    ]
    since = metrics.since(flags)
    if since is not None:
        yield Finding(
            "entropy collapse",
            "watch",
            since,
            f"the entropy fell from {usual:.2g} to {latest(entropy):.2g} nats per token"
            f" ({latest(per_answer):.2g} per answer), and only {latest(passed):.0%} of the answers are right",
            "lower lr, set kl or an entropy bonus, or raise the temperature, and continue from an earlier"
            " checkpoint",
        )


def _is_solved(rates: Values) -> bool:
    """Return whether the mean pass rate shows that the tasks are solved; True without a pass rate."""
    known = [rate for rate in rates if rate is not None]
    return not known or sum(known) / len(known) >= SOLVED_PASS_RATE


def find_chosen_collapse(run: Evidence) -> Iterator[Finding]:
    """Find preference training that makes the chosen answers less likely, too, by the run's own sign."""
    since = run.metrics.alarm_since("collapse")
    if since is None or run.metrics.steps[-1] - since + 1 < CHOSEN_COLLAPSE_STEPS:
        return
    shift = latest(run.metrics.column("chosen_shift")) or 0.0
    yield Finding(
        "chosen collapse",
        "watch",
        since,
        f"chosen answers have lost {-shift:.2g} nats per token while margins grew",
        "set nll or dpop, lower lr, train less, or leave out pairs that are nearly equal",
    )
