"""The environments that process rewards need."""

from perilune.environments.core.protocol import Environment
from perilune.errors import RequestError
from perilune.learn.process_rewards import AnswerValues, MonteCarloValues, ProcessRewardSettings


def check_process_rewards(settings: ProcessRewardSettings | None, environment: Environment) -> None:
    """Refuse an environment whose prefixes cannot be valued.

    Raises:
        RequestError: for Monte Carlo values in an environment of several turns, or the likelihood of the
            right answer in an environment that states none.
    """
    if isinstance(settings, MonteCarloValues) and getattr(environment, "max_turns", 1) > 1:
        raise RequestError(
            f"montecarlo supports one turn per episode, and {environment.id} has several",
            where="process_rewards",
            remedy="use process_rewards: montecarlo only with environments of one turn",
        )
    if isinstance(settings, AnswerValues) and not hasattr(environment, "reference_answer"):
        raise RequestError(
            f"{environment.id} states no right answer, so its likelihood cannot be computed",
            where="process_rewards",
            remedy="use process_rewards: montecarlo, or remove process_rewards",
        )
