"""The held-out tasks that fail most at the latest evaluation, with the reasons."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from perilune.data.episode import Episode
from perilune.ui.attempt import Attempt
from perilune.ui.episodes import RIGHT_REWARD, SAMPLES_LABEL
from perilune.ui.evaluations import Evaluation

MAX_TASKS = 6  # tasks to show
MAX_CHARACTERS = 160  # characters of a text
FORMAT_TERMS = ("format", "well_formed")  # reward terms that are 0 for an answer in another form


@dataclass(frozen=True, slots=True)
class HardTask:
    """One task.

    Attributes:
        prompt: the last message before the first answer.
        why: reasons of the failures, the most frequent first: "5 wrong, 2 truncated".
        answer: the most frequent wrong answer, given `times` times.
        expected: a right answer; "" if the environment states none.
        link: fragment of the page that shows an episode with that answer.
    """

    prompt: str
    right: int
    samples: int
    why: str
    answer: str
    expected: str
    times: int
    stage: str
    link: str


def find_hardest_tasks(judged: Sequence[tuple[Evaluation, Attempt]]) -> list[HardTask]:
    """Return up to `MAX_TASKS` tasks that failed at the last evaluation, the lowest pass rate first."""
    if not judged:
        return []
    evaluation, attempt = judged[-1]
    rates = {task: right / n for task, (n, right) in evaluation.solved.items() if right < n}
    hardest = sorted(rates, key=lambda task: rates[task])[:MAX_TASKS]
    failed: dict[str, list[Episode]] = {task: [] for task in hardest}
    for path in attempt.episode_files if hardest else ():
        for episode in attempt.episodes(path, hardest):
            if episode.reward is None or episode.reward < RIGHT_REWARD:
                failed[episode.task_id].append(episode)
    return [_describe_task(evaluation, task, episodes) for task, episodes in failed.items() if episodes]


def _describe_task(evaluation: Evaluation, task: str, failed: Sequence[Episode]) -> HardTask:
    samples, right = evaluation.solved[task]
    wrong = [episode for episode in failed if episode.reward is not None] or failed
    answer, times = Counter(episode.text for episode in wrong).most_common(1)[0]
    episode_id = next(episode.episode_id for episode in wrong if episode.text == answer)
    reasons = Counter(map(_failure_reason, failed)).most_common()
    return HardTask(
        prompt=_shorten(failed[0].opening[-1]["content"] if failed[0].opening else ""),
        right=right,
        samples=samples,
        why=", ".join(f"{count} {reason}" for reason, count in reasons),
        answer=_shorten(answer),
        expected=_shorten(failed[0].expected),
        times=times,
        stage=evaluation.stage,
        link="/".join(
            ["#episodes", *(quote(part, safe="") for part in (evaluation.stage, SAMPLES_LABEL, episode_id))]
        ),
    )


def _failure_reason(episode: Episode) -> str:
    if episode.reward is None:
        return "not scored"
    if episode.truncated:
        return "truncated"
    return "in another form" if any(episode.reward_terms.get(name) == 0 for name in FORMAT_TERMS) else "wrong"


def _shorten(text: str) -> str:
    text, half = " ".join(text.split()), MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} … {text[-half:]}"
