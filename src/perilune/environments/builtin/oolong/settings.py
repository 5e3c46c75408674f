"""Settings of generated aggregation tasks."""

from typing import Annotated, Literal

from pydantic import Field

from perilune.frozen import Frozen

Group = Literal["counting", "user", "temporal", "pairs"]
Style = Literal["natural", "compact"]

FEWEST_LINES = 8  # fewer could repeat a context by chance
Length = Annotated[int, Field(ge=FEWEST_LINES, le=4_000_000)]


class OolongSettings(Frozen):
    """The settings that determine context and questions."""

    lengths: tuple[Length, ...] = Field(
        (32,),
        min_length=1,
        description="lengths of contexts, in the unit `unit`; each context draws one of them",
    )
    unit: Literal["lines", "tokens"] = Field(
        "lines",
        description="unit of `lengths`. The number of tokens is an estimate: one per word, digit or"
        " punctuation mark in natural contexts, one per character in compact ones",
    )
    users: int = Field(
        8, ge=2, le=1000, description="number of users among whom the lines of a context are distributed"
    )
    zipf: float = Field(
        1.0,
        ge=0,
        le=3,
        description="the n-th most active user writes a share of the lines proportional to n^(-zipf)",
    )
    kinds: tuple[Group, ...] = Field(
        ("counting", "user", "temporal", "pairs"), min_length=1, description="kinds of questions to draw from"
    )
    questions: int = Field(
        1,
        ge=1,
        le=25,
        description="questions to draw for each context; duplicates are removed",
    )
    most_pairs: int = Field(28, ge=1, le=1000, description="maximum number of pairs of users in an answer")
    style: Style = Field(
        "natural",
        description="natural: lines and questions in English; compact: a few characters a line, answer after"
        " ';'",
    )


class OolongSpec(OolongSettings):
    """The environment section of a recipe, for `id: oolong`."""

    id: Literal["oolong"] = Field("oolong", description="id of the environment")
