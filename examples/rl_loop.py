"""Run a complete GRPO training loop: a new model first imitates one-digit sums, then learns from rewards.

    python examples/rl_loop.py            # 30 steps of GRPO, less than a minute on one core
    python examples/rl_loop.py 5          # 5 steps of GRPO

It uses seven methods: `sample`, `score` and `update_weights` of the engine, and `forward_backward`,
`optim_step`, `save_state` and `load_state` of the learner. docs/tutorial/loop-by-hand.md explains each part.
"""

# --- a problem and a policy
import sys
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import torch

import perilune
from perilune import Engine, Episode, Learner, Prompt, SamplingParams, Scorer, Transcript, pack

torch.set_num_threads(1)
STEPS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 30
section = {
    "id": "reasoning_gym",
    "task": "basic_arithmetic",
    "prompt": "compact",
    "config": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
}
scorer = Scorer(section)  # scores in a separate process
environment = perilune.make_environment(section)
tasks = list(islice(environment.tasks("train", seed=0), 64))

policy, tokenizer = perilune.load_model("tiny", seed=0)
engine, learner = Engine(policy), Learner(policy)

# --- a cold start: imitate right answers for a few steps
answers = [Episode.from_completion(task, ";" + task.data["answer"], tokenizer) for task in tasks]
imitation = perilune.algorithm("sft")(answers, max_tokens=8)

for step in range(16):
    metrics = learner.forward_backward(pack([imitation], token_budget=4096))
    metrics |= learner.optim_step(lr=3e-3 * min(1, (step + 1) / 10))
print(f"cold start: loss {metrics['loss']:.2f}")

# --- rollouts: sample and score groups of answers
params = SamplingParams(max_tokens=8, stop_token_ids=(tokenizer.eos_token_id,))


def rollout(tasks, samples, step):
    """Sample and score answers, and return one group of episodes per task."""
    prompts = [
        Prompt(tokenizer.encode_prompt(task.prompt), key=(0, step, index)) for index, task in enumerate(tasks)
    ]
    groups = []
    for task, completions in zip(tasks, engine.sample(prompts, samples, params), strict=True):
        texts = [Transcript(tokenizer.decode(c.token_ids), c.finish_reason == "stop") for c in completions]
        scored = zip(completions, scorer.score([(task, text) for text in texts]), strict=True)
        groups.append(
            [
                Episode.from_completion(task, completion, tokenizer, score, sample=number)
                for number, (completion, score) in enumerate(scored)
            ]
        )
    return groups


def pass_rate(groups):
    """Share of right answers."""
    return np.mean([episode.reward for group in groups for episode in group])


engine.update_weights(None, version=learner.version)
before = pass_rate(rollout(tasks, 8, step=0))

# --- the training loop: update on groups whose rewards differ
grpo = perilune.algorithm("grpo")
gaps = []
for step in range(1, STEPS + 1):
    engine.update_weights(None, version=learner.version)
    groups = rollout(tasks[step % 4 :: 4], 8, step)
    weighted = [grpo(group, max_tokens=8) for group in groups]
    metrics = learner.forward_backward(
        pack([group for group in weighted if not group.dead], token_budget=4096)
    )
    metrics |= learner.optim_step(lr=1e-3 * min(1, step / 5))
    gaps.append(metrics.get("logprob_gap_max", 0.0))

engine.update_weights(None, version=learner.version)
after = pass_rate(rollout(tasks, 8, step=STEPS + 1))
print(f"{STEPS} steps of GRPO: pass rate {before:.2f}, then {after:.2f}")
assert after > before + 0.2 or STEPS < 30

# --- check that engine and learner agree
assert max(gaps) < 1e-6  # at every step, on every token

group = rollout(tasks[:4], 4, step=STEPS + 2)[0]
scored = engine.score([e.prompt_ids for e in group], [e.token_ids for e in group])
assert max(np.abs(e.logprobs - again).max() for e, again in zip(group, scored, strict=True)) < 1e-6

# --- save and resume
saved = Path(tempfile.mkdtemp()) / "checkpoint"
learner.save_state(saved, {"step": STEPS})
other = Learner(perilune.load_model("tiny", seed=1)[0])
assert other.load_state(saved) == {"step": STEPS}

for resumed in (learner, other):
    resumed.forward_backward(pack([imitation], token_budget=4096))
    resumed.optim_step(lr=1e-3)
for mine, theirs in zip(learner.decoder.parameters(), other.decoder.parameters(), strict=True):
    assert torch.equal(mine, theirs)  # to the last bit

scorer.close()
