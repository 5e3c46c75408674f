"""Settings of wide lookups."""

from typing import Annotated, Literal

from pydantic import Field

from perilune.frozen import Frozen

Keys = Annotated[int, Field(ge=1, le=26)]


class WideLookupSpec(Frozen):
    """The environment section of a recipe, for `id: wide_lookup`."""

    id: Literal["wide_lookup"] = Field("wide_lookup", description="id of the environment")
    keys: tuple[Keys, ...] = Field(
        (8,),
        min_length=1,
        description="number of keys of a task, drawn from this list; each key has its own shard",
    )
    letters: int = Field(
        8,
        ge=0,
        le=4096,
        description="number of small letters in a shard, among which its key and value are hidden",
    )
    turns: int = Field(32, ge=2, le=64, description="maximum turns of the orchestrator")
    notes: Literal["kept", "last"] = Field(
        "kept",
        description="notes of the orchestrator that count. kept: all; last: only those of its last action",
    )
    critical_budget: int | None = Field(
        None,
        ge=1,
        description="maximum critical steps (rounds of turns that run at the same time) for reward 1;"
        " null: no limit",
    )
    sub_agents: int = Field(
        16,
        ge=0,
        le=256,
        description="maximum sub-agents that run in an episode; any more that the orchestrator spawns do"
        " not start",
    )
    sub_agent_turns: int = Field(4, ge=1, le=64, description="maximum turns of a sub-agent")
