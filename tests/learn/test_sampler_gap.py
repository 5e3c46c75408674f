"""The learner sees the log-probs that the engine sampled with, through packing and shared prompts."""

import numpy as np
import pytest

from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.trainer import Learner
from perilune.models.loading import new_model
from perilune.models.tokenizer import Tokenizer


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize(("temperature", "token_budget"), [(1.0, 100_000), (0.8, 60)])
def test_engine_and_learner_agree(temperature: float, token_budget: int) -> None:
    tokenizer = Tokenizer.characters()
    decoder = new_model("tiny", tokenizer, seed=3)
    texts = ["12+7=", "347+268=", "what is 1?"]
    prompts = [Prompt(tokenizer.encode(text), (0, 1, i)) for i, text in enumerate(texts)]
    engine, learner = Engine(decoder), Learner(decoder)
    for _ in range(2):  # with fresh weights, and after an update
        engine.update_weights(None, learner.version)
        params = SamplingParams(30, temperature, stop_token_ids=tuple(range(5)))
        sampled = engine.sample(prompts, 4, params)
        groups = [
            [
                Episode(
                    f"1/{i}/{j}", f"1/{i}", f"t{i}", "test", 0, (), np.array(prompt.token_ids, np.int32),
                    one.token_ids, np.ones(len(one.token_ids), np.bool_), one.logprobs, one.policy_version,
                    one.finish_reason, reward=float(j % 2),
                )
                for j, one in enumerate(answers)
            ]
            for i, (prompt, answers) in enumerate(zip(prompts, sampled, strict=True))
        ]  # fmt: skip
        weighed = [algorithm("grpo")(group, max_tokens=30) for group in groups]
        figures = learner.forward_backward(pack(weighed, token_budget, temperature=temperature))
        assert figures["tokens"] == sum(len(one.token_ids) for group in groups for one in group)
        assert figures["logprob_gap_max"] == 0
        assert figures["clip_fraction"] == 0
        assert figures["staleness"] == 0
        learner.optim_step(1e-2)
