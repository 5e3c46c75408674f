"""Perilune: post-training of language models from one recipe.

The names in `__all__` are the public API. Each is imported on first use, so `import perilune` loads no other
package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.control.runs.run_recipe import evaluate as evaluate
    from perilune.control.runs.run_recipe import run as run
    from perilune.data.episode import Episode as Episode
    from perilune.engine.engine import Engine as Engine
    from perilune.engine.request import Prompt as Prompt
    from perilune.engine.request import SamplingParams as SamplingParams
    from perilune.environments.core.protocol import Transcript as Transcript
    from perilune.environments.core.registry import make_environment as make_environment
    from perilune.learn.algorithms import algorithm as algorithm
    from perilune.learn.batch import pack as pack
    from perilune.learn.trainer import Learner as Learner
    from perilune.metrics.pass_at_k import pass_at_k as pass_at_k
    from perilune.models.checkpoints.loading import load_model as load_model
    from perilune.models.text.tokenizer import Tokenizer as Tokenizer
    from perilune.recipe.load import load_recipe as load_recipe
    from perilune.recipe.schema import Recipe as Recipe
    from perilune.verifiers.scorer import Scorer as Scorer

__version__ = "0.1.0"

_MODULES = {
    "Engine": "perilune.engine.engine",
    "Episode": "perilune.data.episode",
    "Learner": "perilune.learn.trainer",
    "Prompt": "perilune.engine.request",
    "Recipe": "perilune.recipe.schema",
    "SamplingParams": "perilune.engine.request",
    "Scorer": "perilune.verifiers.scorer",
    "Tokenizer": "perilune.models.text.tokenizer",
    "Transcript": "perilune.environments.core.protocol",
    "algorithm": "perilune.learn.algorithms",
    "evaluate": "perilune.control.runs.run_recipe",
    "load_model": "perilune.models.checkpoints.loading",
    "load_recipe": "perilune.recipe.load",
    "make_environment": "perilune.environments.core.registry",
    "pack": "perilune.learn.batch",
    "pass_at_k": "perilune.metrics.pass_at_k",
    "run": "perilune.control.runs.run_recipe",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'perilune' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
