"""The defaults of a stage that depend on the model: made here or pretrained, its size, LoRA or not.

A new model gets the defaults of the stage's fields, and the rate `fresh`. Its rates are about a hundred times
as high as those of a pretrained model, which they would destroy within a few steps. The values for pretrained
models follow TRL 1.16 (sft 2e-5, grpo and dpo 1e-6 without KL, reward model 1e-4, adapters 10 times the rate,
answers of 256 tokens), verl (grpo 1e-6 without KL) and the recipes of SmolLM2 (dpo 1e-6, warm-up over a tenth
of the steps). Below a billion parameters reinforcement learning gets 5e-6: at that rate, SmolLM2-135M went
from 4.7% to 14.8% on sums within 60 steps of 128 answers.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from perilune.frozen import Frozen
from perilune.models.config.decoder_config import DecoderConfig, find_preset
from perilune.models.memory import get_model_card, learning_bytes, plan_memory
from perilune.tasks.forgetting.settings import ForgettingSettings
from perilune.tasks.stage.memory_plan import section_config

if TYPE_CHECKING:
    from perilune.models.narrow import Precision


class Rates(NamedTuple):
    """Peak learning rates for all weights of a model.

    Attributes:
        fresh: for a new model.
        small: for a pretrained model of less than `LARGE` parameters.
        large: for a larger one.
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
LORA = 10.0  # factor of the rate for an adapter of a pretrained model
LARGE = 1_000_000_000  # parameters
LEAST_PRETRAINED = 10_000_000  # parameters; a smaller model in a folder was made here, as are all presets
NARROW = 128  # width of a preset up to which `fresh` is the rate
MOST_WARMUP = 20  # steps
MOST_TOKENS = 256  # of an answer
MOST_EXAMPLES = 16  # traces, pairs or tasks of a step
BUDGETS = (4096, 2048, 1024, 512)  # tokens of a forward pass
LEARNING_BYTES = 4 << 30  # most memory for one
GPU_BUDGETS = (16384, 8192, *BUDGETS)
ACTIVATION_BYTES = (
    20 << 30
)  # most memory for the activations of one on a GPU, which needs many tokens to be busy


class Default(NamedTuple):
    """A value, and the reason for it in words."""

    value: Any
    reason: str


class ModelDefaults(Frozen):
    """Fields whose default depends on the model of the recipe.

    In a loaded recipe, those that the recipe does not set are None until `complete` makes the job's spec.
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
        """The fields of a stage with those of `by_model` that are None filled in.

        Args:
            task: kind of stage; an unknown kind gets the learning rates of rl.
            model: the recipe's model section.
            device: the recipe's device: "cuda"; everything else counts as "cpu".

        Raises:
            RequestError: when the model's config.json cannot be read.
        """
        missing = [name for name in cls.by_model if name in spec and spec[name] is None]
        if not missing:
            return dict(spec)
        found = cls.defaults(task, spec, model, device)
        return {**spec, **{name: found[name].value for name in missing}}

    @classmethod
    def defaults(
        cls, task: str, spec: Mapping[str, Any], model: Mapping[str, Any], device: str
    ) -> dict[str, Default]:
        """The default of each field of `by_model` that the spec has."""
        own = {name: cls.model_fields[name].default for name in cls.by_model if name in cls.model_fields}
        if not is_pretrained(model):
            source = f"a new model (preset {model['preset']})" if model.get("preset") else "a small model"
            found = {name: Default(value, f"the default for {source}") for name, value in own.items()}
            if "lr" in found:
                found["lr"] = _fresh_lr(task, section_config(model), found["lr"].reason)
            return found
        config = section_config(model)
        return {
            name: _FOR_PRETRAINED[name](_Choice(task, spec, config, device, value))
            for name, value in own.items()
        }


def is_pretrained(model: Mapping[str, Any]) -> bool:
    """Whether a recipe's model section names a folder, with a model larger than those that are made here."""
    if not model or model.get("preset"):
        return False
    config = section_config(model)
    return find_preset(config) is None and get_model_card(config).parameters >= LEAST_PRETRAINED


def _fresh_lr(task: str, config: DecoderConfig, reason: str) -> Default:
    """The rate of a new model: in inverse proportion to the width of presets that are wider than `NARROW`.

    The best rate of AdamW falls with the width in this way (Yang et al. 2022, muP, table 3). After 30 steps
    of SFT, the loss of `large` was 1.58 with this rate and 1.71 with 3e-3.
    """
    rate = RATES.get(task, RATES["rl"]).fresh
    if find_preset(config) is None or config.hidden_size <= NARROW:
        return Default(rate, reason)
    return Default(rate * NARROW / config.hidden_size, f"{reason}, for its width of {config.hidden_size}")


class _Choice(NamedTuple):
    """What the default of a field for a pretrained model depends on; `own` is that for a new model."""

    task: str
    spec: Mapping[str, Any]
    config: DecoderConfig
    device: str
    own: Any


def _sized(config: DecoderConfig) -> str:
    count = get_model_card(config).parameters
    size = f"{count / 1e9:.1f}B" if count >= LARGE else f"{count / 1e6:.3g}M"
    return f"a pretrained model of {size} parameters"


def _lr(of: _Choice) -> Default:
    rates = RATES.get(of.task, RATES["rl"])
    rate = rates.large if get_model_card(of.config).parameters >= LARGE else rates.small
    model = _sized(of.config)
    if of.spec.get("lora") is not None:
        return Default(rate * LORA, f"an adapter (LoRA) of {model}: {LORA:g} times the rate of all weights")
    return Default(rate, f"full fine-tuning of {model}")


def _warmup(of: _Choice) -> Default:
    steps = of.spec.get("updates") or of.spec["steps"]
    return Default(min(MOST_WARMUP, ceil(steps / 10)), f"a tenth of the steps, at most {MOST_WARMUP}")


def _kl(of: _Choice) -> Default:
    return Default(0.0, "no reference policy, as in TRL and verl; 0.01 keeps the policy nearer to its start")


def _examples(of: _Choice) -> Default:
    return Default(min(of.own, MOST_EXAMPLES), "small steps: a pretrained model needs fewer examples")


def _token_budget(of: _Choice) -> Default:
    if of.device == "cuda":
        return _token_budget_of_gpu(of)

    def needed(budget: int) -> int:
        return plan_memory(of.config, learning=(budget, min(budget, 512))).transient["learning"]

    budget = next((one for one in BUDGETS if needed(one) <= LEARNING_BYTES), BUDGETS[-1])
    return Default(budget, f"a pass with all gradients takes about {needed(budget) / 2**30:.1f} GiB")


def _token_budget_of_gpu(of: _Choice) -> Default:
    recompute = bool(of.spec.get("activation_checkpointing"))
    precision: Precision = of.spec.get("precision", "float32")

    def needed(budget: int) -> int:
        return learning_bytes(of.config, budget, min(budget, 512), recompute=recompute, gpu=precision)

    budget = next((one for one in GPU_BUDGETS if needed(one) <= ACTIVATION_BYTES), BUDGETS[-1])
    return Default(budget, f"the activations of a pass take about {needed(budget) / 2**30:.1f} GiB")


def _max_tokens(of: _Choice) -> Default:
    most = max(1, min(MOST_TOKENS, of.config.max_position_embeddings // 2))
    return Default(most, "room for written-out work; half of the positions at most")


_FOR_PRETRAINED: dict[str, Callable[[_Choice], Default]] = {
    "lr": _lr,
    "warmup": _warmup,
    "kl": _kl,
    "batch_size": _examples,
    "prompts": _examples,
    "token_budget": _token_budget,
    "max_tokens": _max_tokens,
    "forgetting": lambda of: Default(ForgettingSettings().model_dump(mode="json"), ""),
}
