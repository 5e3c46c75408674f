"""The `forgetting` section of a training stage."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from perilune.environments.core.registry import family_field, make_environment, part_sections
from perilune.frozen import Frozen
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS

PASSAGES = 24  # passages of the text that ships with the package
EXAMPLES = 3  # solved examples before each task of another environment
# With one constraint per request, SmolLM2-135M-Instruct is right in 5 of 32 answers; with up to three, in 1.
FIELDS: Mapping[str, Mapping[str, Any]] = {"instructions": {"constraints": 1}}  # by id; others have defaults


class ForgettingSettings(Frozen):
    """The measurements of the checkpoint before and after a stage, besides its own task."""

    passages: int = Field(
        PASSAGES,
        ge=0,
        le=PASSAGES,
        description="passages of English text for the perplexity; 0: it is not measured",
    )
    environments: tuple[str, ...] = Field(
        ("instructions", "reasoning_gym/letter_counting", "reasoning_gym/number_sorting"),
        description="environments for pass@1, as ID/FAMILY; those that the recipe trains on are left out."
        " Each request of instructions has one constraint",
    )
    tasks: int = Field(
        16,
        ge=0,
        le=MAX_TASKS,
        description="held-out tasks of each of these environments, and of the recipe's own for the KL to"
        " the initial policy; 0: neither is measured",
    )
    samples: int = Field(2, ge=1, le=MAX_SAMPLES, description="answers per task")
    max_tokens: int = Field(64, ge=1, description="maximum tokens of each of these answers")

    def sections(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the sections of the environments without `own`, that of the recipe, and without its parts.

        Raises:
            RequestError: when an environment is unknown.
        """
        sections = [environment_section(name) for name in self.environments] if self.tasks else []
        trained = {make_environment(one).id for one in (own, *part_sections(own).values())} if own else set()
        return [section for section in sections if make_environment(section).id not in trained]

    def describe(self, own: Mapping[str, Any]) -> str:
        parts = [f"{self.passages} passages of English text"] if self.passages else []
        if self.tasks:
            others = (
                ", ".join(make_environment(section).id for section in self.sections(own))
                or "no other environment"
            )
            kl = "; KL to the start" if own else ""
            parts.append(f"{self.tasks} tasks x {self.samples} of {others}{kl}")
        return ", ".join(parts) or "nothing"


def environment_section(name: str) -> dict[str, Any]:
    """Return the environment section of an id with its family, such as reasoning_gym/chain_sum.

    Where right answers are known, examples show their form: else a model that was never trained there would
    be scored 0 before and after.
    """
    identifier, _, family = name.partition("/")
    section: dict[str, Any] = {"id": identifier, **FIELDS.get(identifier, {})}
    if family:
        section[family_field(identifier)] = family
    environment = make_environment(section)
    if getattr(environment, "max_turns", 1) == 1 and hasattr(environment, "gold"):
        section["prompting"] = {"few_shot": EXAMPLES}
    return section
