"""Defaults of a stage that depend on the model: new or pretrained, its size, and whether LoRA is used.

A new model gets the defaults of the stage's fields and the learning rate `fresh`. This rate is about a
hundred times that of a pretrained model, which it would destroy within a few steps. The values for pretrained
models follow TRL 1.16 (sft 2e-5, grpo and dpo 1e-6 without KL, reward model 1e-4, adapters 10 times the rate,
answers of 256 tokens), verl (grpo 1e-6 without KL) and the recipes of SmolLM2 (dpo 1e-6, warm-up over a tenth
of the steps). Below a billion parameters, the rate of reinforcement learning is 5e-6: at that rate,
SmolLM2-135M went from 4.7% to 14.8% on sums within 60 steps of 128 answers.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from perilune.frozen import Frozen
from perilune.models.config.decoder_config import DecoderConfig, find_preset
from perilune.models.memory import get_model_card, learning_bytes, plan_memory
from perilune.tasks.forgetting.settings import ForgettingSettings
from perilune.tasks.stage.memory_plan import section_config


class Rates(NamedTuple):
    """Peak learning rates for all weights of a model.

    Attributes:
        fresh: for a new model.
        small: for a pretrained model of less than `LARGE_PARAMETERS` parameters.
        large: for a larger pretrained model.
    """

    fresh: float
    small: float
    large: float


RATES = {
    "sft": Rates(3e-3, 2e-5, 2e-5),
    "rl": Rates(2e-4, 5e-6, 1e-6),
    "selfplay": Rates(2e-4, 5e-6, 1e-6),
    "preference": Rates(2e-4, 1e-6, 1e-6),
    "distill": Rates(1e-3, 5e-6, 1e-6),
    "reward_model": Rates(1e-3, 1e-4, 1e-4),
    "flywheel": Rates(1e-3, 2e-5, 2e-5),
}
LORA_FACTOR = 10.0  # learning rate of an adapter, relative to that of all weights
LARGE_PARAMETERS = 1_000_000_000
MIN_PRETRAINED_PARAMETERS = 10_000_000  # a smaller model in a folder counts as new, like the presets
BASE_WIDTH = 128  # width of a preset up to which `fresh` is the rate
MAX_WARMUP_STEPS = 20
MAX_ANSWER_TOKENS = 256
MAX_STEP_EXAMPLES = 16  # traces, pairs or tasks of a step
CPU_TOKEN_BUDGETS = (4096, 2048, 1024, 512)  # tokens of a forward pass
GPU_TOKEN_BUDGETS = (16384, 8192, *CPU_TOKEN_BUDGETS)
MAX_PASS_BYTES = 4 << 30  # memory of a forward and backward pass on a CPU
MAX_ACTIVATION_BYTES = 20 << 30  # activations of a pass on a GPU, which needs many tokens to be busy


class Default(NamedTuple):
    """A default value, and the reason for it in words."""

    value: Any
    reason: str


class ModelDefaults(Frozen):
    """Fields whose default depends on the model of the recipe.

    In a loaded recipe, a field of `by_model` that the recipe does not set is None. `complete` replaces None
    by the default when the job is made.
    """

    by_model: ClassVar[tuple[str, ...]] = (
        "lr",
        "warmup",
        "kl",
        "batch_size",
        "prompts",
        "token_budget",
        "max_tokens",
        "forgetting",
    )

    @classmethod
    def complete(
        cls, task: str, spec: Mapping[str, Any], model: Mapping[str, Any], device: str
    ) -> dict[str, Any]:
        """Return the fields of a stage, with defaults for those of `by_model` that are None.

        Args:
            task: kind of stage; an unknown kind gets the learning rates of rl.
            device: the recipe's device: "cuda"; everything else counts as "cpu".

        Raises:
            RequestError: when the model's config.json cannot be read.
        """
        missing = [name for name in cls.by_model if name in spec and spec[name] is None]
        if not missing:
            return dict(spec)
        defaults = cls.defaults(task, spec, model, device)
        return {**spec, **{name: defaults[name].value for name in missing}}

    @classmethod
    def defaults(
        cls, task: str, spec: Mapping[str, Any], model: Mapping[str, Any], device: str
    ) -> dict[str, Default]:
        """Return the default of each field of `by_model` that the spec has."""
        own = {name: cls.model_fields[name].default for name in cls.by_model if name in cls.model_fields}
        if not is_pretrained(model):
            source = f"a new model (preset {model['preset']})" if model.get("preset") else "a small model"
            defaults = {name: Default(value, f"the default for {source}") for name, value in own.items()}
            if "lr" in defaults:
                defaults["lr"] = _new_model_lr(task, section_config(model), defaults["lr"].reason)
            return defaults
        config = section_config(model)
        return {
            name: _FOR_PRETRAINED[name](_Context(task, spec, config, device, value))
            for name, value in own.items()
        }


def is_pretrained(model: Mapping[str, Any]) -> bool:
    """Return whether a recipe's model section names a pretrained model: no preset, and not a small model."""
    if not model or model.get("preset"):
        return False
    config = section_config(model)
    return find_preset(config) is None and get_model_card(config).parameters >= MIN_PRETRAINED_PARAMETERS


def _new_model_lr(task: str, config: DecoderConfig, reason: str) -> Default:
    """Return the learning rate of a new model, scaled by 1/width for presets wider than `BASE_WIDTH`.

    The best rate of AdamW falls with the width in this way (Yang et al. 2022, muP, table 3). After 30 steps
    of SFT, the loss of `large` was 1.58 with this rate and 1.71 with 3e-3.
    """
    rate = RATES.get(task, RATES["rl"]).fresh
    if find_preset(config) is None or config.hidden_size <= BASE_WIDTH:
        return Default(rate, reason)
    return Default(rate * BASE_WIDTH / config.hidden_size, f"{reason}, for its width of {config.hidden_size}")


class _Context(NamedTuple):
    """The inputs of a default for a pretrained model.

    Attributes:
        own: the field's default for a new model.
    """

    task: str
    spec: Mapping[str, Any]
    config: DecoderConfig
    device: str
    own: Any


def _describe_size(config: DecoderConfig) -> str:
    count = get_model_card(config).parameters
    size = f"{count / 1e9:.1f}B" if count >= LARGE_PARAMETERS else f"{count / 1e6:.3g}M"
    return f"a pretrained model of {size} parameters"


def _default_lr(context: _Context) -> Default:
    rates = RATES.get(context.task, RATES["rl"])
    rate = rates.large if get_model_card(context.config).parameters >= LARGE_PARAMETERS else rates.small
    model = _describe_size(context.config)
    if context.spec.get("lora") is not None:
        reason = f"an adapter (LoRA) of {model}: {LORA_FACTOR:g} times the rate of all weights"
        return Default(rate * LORA_FACTOR, reason)
    return Default(rate, f"full fine-tuning of {model}")


def _default_warmup(context: _Context) -> Default:
    updates = context.spec.get("updates")  # of a round of flywheel
    warmup = min(MAX_WARMUP_STEPS, ceil((updates or context.spec["steps"]) / 10))
    unit = "updates of a round" if updates else "steps"
    return Default(warmup, f"a tenth of the {unit}, at most {MAX_WARMUP_STEPS}")


def _default_kl(context: _Context) -> Default:
    return Default(0.0, "no reference policy, as in TRL and verl; 0.01 keeps the policy nearer to its start")


def _default_examples(context: _Context) -> Default:
    examples = min(context.own, MAX_STEP_EXAMPLES)
    return Default(examples, "small steps: a pretrained model needs fewer examples")


def _default_token_budget(context: _Context) -> Default:
    config, spec, on_gpu = context.config, context.spec, context.device == "cuda"

    def pass_bytes(budget: int) -> int:
        length = min(budget, 512)
        if not on_gpu:
            return plan_memory(config, learning=(budget, length)).transient["learning"]
        recompute, precision = bool(spec.get("activation_checkpointing")), spec.get("precision", "float32")
        return learning_bytes(config, budget, length, recompute=recompute, gpu=precision)

    budgets: tuple[int, ...] = GPU_TOKEN_BUDGETS if on_gpu else CPU_TOKEN_BUDGETS
    limit = MAX_ACTIVATION_BYTES if on_gpu else MAX_PASS_BYTES
    budget = next((budget for budget in budgets if pass_bytes(budget) <= limit), budgets[-1])
    subject = "the activations of a pass take" if on_gpu else "a pass with all gradients takes"
    return Default(budget, f"{subject} about {pass_bytes(budget) / 2**30:.1f} GiB")


def _default_max_tokens(context: _Context) -> Default:
    tokens = max(1, min(MAX_ANSWER_TOKENS, context.config.max_position_embeddings // 2))
    return Default(tokens, "room for written-out work; half of the positions at most")


def _default_forgetting(context: _Context) -> Default:
    settings = ForgettingSettings().model_dump(mode="json")
    return Default(settings, "a pretrained model can lose other abilities while it learns one task")


_FOR_PRETRAINED: dict[str, Callable[[_Context], Default]] = {
    "lr": _default_lr,
    "warmup": _default_warmup,
    "kl": _default_kl,
    "batch_size": _default_examples,
    "prompts": _default_examples,
    "token_budget": _default_token_budget,
    "max_tokens": _default_max_tokens,
    "forgetting": _default_forgetting,
}


class ForgettingSpec(ModelDefaults):
    """The field of stages that can measure forgetting. By default, they measure it for pretrained models."""

    forgetting: ForgettingSettings | Literal[False] = Field(
        False,
        description="measure forgetting before and after the stage: perplexity of text, pass@1 in other"
        " environments, and KL to the initial policy. false: do not measure it. Default: false"
        " for new models, the section's defaults for pretrained ones",
    )
