"""The search teacher: searches the corpora of the environment facts, from code or with single calls."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.environments.search import functions
from perilune.environments.search.facts.environment import ANSWER_MARK
from perilune.environments.search.facts.questions import Question
from perilune.environments.search.facts.world import draw_world, make_corpus
from perilune.environments.search.index import get_index
from perilune.errors import RequestError

_FACT_RESULTS, _CITY_RESULTS = 3, 12  # results of a query for a fact, and for the facts about a city
_VALUE = f"extract(search({{0}},{_FACT_RESULTS}),{{0}}+' {{{{}}}}')[0]"
_ABOUT = f"filter(search(n,{_CITY_RESULTS}),n)"


class SearchTeacher(ScriptedTeacher):
    """Writes one episode per task, for compact prompts and compact documents.

    * code: one line of Python, which prints the answer,
    * calls: the same functions, one call a turn,
    * guess: the right answer at once, which a policy that has not searched could not know.
    """

    name = "search"
    strategies: ClassVar = {"code": 1.0, "calls": 0.0, "guess": 0.0}

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Return the actions of the strategy.

        Raises:
            RequestError: when the task is of another environment, or not compact.
        """
        data: Mapping[str, Any] = task.data.get("task", {})
        if data.get("style") != "compact" or "world" not in data:
            raise RequestError(
                "the search teacher supports the environment search with compact tasks of facts",
                where="teacher",
                remedy="set prompt: compact and tasks: {id: facts, style: compact}",
            )
        asked, answer = Question(**data["question"]), ANSWER_MARK + data["answer"]
        if strategy == "guess":
            return (answer,)
        if strategy == "code":
            return (_write_code(asked), answer)
        return (*_list_calls(asked, data), answer)


def _write_code(asked: Question) -> str:
    name = asked.name
    match asked.kind:
        case "one":
            return f"n='{name} {asked.relation}';print({_VALUE.format('n')})"
        case "two":
            return f"n='{name} h';n={_VALUE.format('n')}+' l';print({_VALUE.format('n')})"
        case "count":
            return f"n='c {name}';print(len(dedup({_ABOUT})))"
    companies = f"extract({_ABOUT},'{{}} c')"
    return (
        f"n='c {name}';f=fan_out([x+' s'for x in {companies}],{_FACT_RESULTS});"
        f"print(len(dedup(filter(f,'s {asked.goods}'))))"
    )


def _list_calls(asked: Question, data: Mapping[str, Any]) -> Sequence[str]:
    name = asked.name
    match asked.kind:
        case "one":
            return (f"search('{name} {asked.relation}',{_FACT_RESULTS})",)
        case "two":
            head = draw_world(data["world"], data["companies"]).values[name, "h"]
            return (f"search('{name} h',{_FACT_RESULTS})", f"search('{head} l',{_FACT_RESULTS})")
        case "count":
            return (f"search('c {name}',{_CITY_RESULTS})", f"filter('c {name}')", "dedup()")
    documents = make_corpus(data["world"], data["companies"], data["style"])
    matches = functions.filter(get_index(documents).search(f"c {name}", _CITY_RESULTS), f"c {name}")
    companies = functions.extract(functions.dedup(matches), "{} c")
    queries = [f"{company} s" for company in companies]
    return (
        f"search('c {name}',{_CITY_RESULTS})",
        f"filter('c {name}')",
        "dedup()",
        f"fan_out({queries!r},{_FACT_RESULTS})".replace(", ", ","),
        f"filter('s {asked.goods}')",
        "dedup()",
    )
