"""GRPO on one page, by hand: a fresh model learns one-digit sums, first shown and then on its own.

    python examples/rl_loop.py            # under a minute on one core
    python examples/rl_loop.py 5          # so many steps of the climb

Seven verbs do everything: `sample`, `score` and `update_weights` of the engine, `forward_backward`,
`optim_step`, `save_state` and `load_state` of the learner. docs/tutorial/loop-by-hand.md explains each part.
"""

# --- a problem and a policy
import sys
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.environments import Transcript, make_environment
from perilune.learn.batch import pack
from perilune.learn.trainer import Learner
from perilune.learn.weights import Component, GroupWeights
from perilune.models.loading import new_model
from perilune.models.tokenizer import Tokenizer
from perilune.verifiers import Scorer

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
scorer = Scorer(section)  # judges in a process of its own
environment = make_environment(section)
tasks = list(islice(environment.tasks("train", seed=0), 64))

tokenizer = Tokenizer.characters()
policy = new_model("tiny", tokenizer, seed=0)
engine, learner = Engine(policy), Learner(policy)


# --- episodes
def episode(task, number, token_ids, logprobs, version, reward, finish_reason="stop"):
    """One answer to one task, token by token, and what it was worth."""
    return Episode(
        episode_id=f"{task.task_id}/{number}",
        group_id=task.task_id,
        task_id=task.task_id,
        environment=environment.id,
        seed=0,
        messages=task.prompt,
        prompt_ids=np.array(tokenizer.encode_prompt(task.prompt), np.int32),
        token_ids=token_ids,
        loss_mask=np.ones(len(token_ids), np.bool_),
        logprobs=logprobs,
        policy_version=version,
        finish_reason=finish_reason,
        reward=reward,
    )


# --- a cold start: imitate right answers, and stop while there is still something to learn
def imitation(episodes):
    """Cross-entropy: every token of every answer weighs 1, and the loss is their mean."""
    ones = tuple(np.ones(len(one.token_ids), np.float32) for one in episodes)
    return GroupWeights(tuple(episodes), cross_entropy=Component(ones, tuple(float(len(w)) for w in ones)))


answers = []
for task in tasks:
    ids = np.array(tokenizer.encode_completion(";" + task.data["answer"]), np.int32)
    unknown = np.zeros(len(ids), np.float32)  # nobody sampled these tokens
    answers.append(episode(task, 0, ids, unknown, np.full(len(ids), -1, np.int32), reward=1.0))

for step in range(16):
    figures = learner.forward_backward(pack([imitation(answers)], token_budget=4096))
    figures |= learner.optim_step(lr=3e-3 * min(1, (step + 1) / 10))
print(f"cold start: loss {figures['loss']:.2f}")

# --- rollouts: sample groups of answers, and let the verifier judge them
params = SamplingParams(max_tokens=8, stop_token_ids=(tokenizer.eos_token_id,))


def play(tasks, samples, step):
    """Groups of scored episodes, one group a task."""
    prompts = [
        Prompt(tokenizer.encode_prompt(task.prompt), key=(0, step, index)) for index, task in enumerate(tasks)
    ]
    groups = []
    for task, completions in zip(tasks, engine.sample(prompts, samples, params), strict=True):
        texts = [Transcript(tokenizer.decode(c.token_ids), c.finish_reason == "stop") for c in completions]
        scores = scorer.score([(task, text) for text in texts])
        group = []
        for number, (c, score) in enumerate(zip(completions, scores, strict=True)):
            reason = c.finish_reason
            group.append(
                episode(task, number, c.token_ids, c.logprobs, c.policy_version, score.reward, reason)
            )
        groups.append(group)
    return groups


def pass_rate(groups):
    """Share of right answers."""
    return np.mean([one.reward for group in groups for one in group])


engine.update_weights(None, version=learner.version)
before = pass_rate(play(tasks, 8, step=0))


# --- the algorithm: how much better was an answer than the others to the same task?
def grpo(group):
    """A = (r - mean) / (std + 1e-4), on every token of the answer; the loss is the mean over all tokens."""
    rewards = np.array([one.reward for one in group])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    lengths = [len(one.token_ids) for one in group]
    weights = tuple(np.full(n, a, np.float32) for n, a in zip(lengths, advantages, strict=True))
    return GroupWeights(tuple(group), policy_gradient=Component(weights, tuple(map(float, lengths))))


# --- the climb
gaps = []
for step in range(1, STEPS + 1):
    engine.update_weights(None, version=learner.version)
    groups = play(tasks[step % 4 :: 4], 8, step)
    live = [
        grpo(group) for group in groups if len({one.reward for one in group}) > 1
    ]  # equal teaches nothing
    figures = learner.forward_backward(pack(live, token_budget=4096))
    figures |= learner.optim_step(lr=1e-3 * min(1, step / 5))
    gaps.append(figures.get("logprob_gap_max", 0.0))

engine.update_weights(None, version=learner.version)
after = pass_rate(play(tasks, 8, step=STEPS + 1))
print(f"{STEPS} steps of GRPO: pass rate {before:.2f}, then {after:.2f}")
assert after > before + 0.2 or STEPS < 30

# --- do sampler and learner agree?
assert max(gaps) < 1e-6  # at every step, on every token

group = play(tasks[:4], 4, step=STEPS + 2)[0]
scored = engine.score([one.prompt_ids for one in group], [one.token_ids for one in group])
assert max(np.abs(one.logprobs - again).max() for one, again in zip(group, scored, strict=True)) < 1e-6

# --- leave and come back
saved = Path(tempfile.mkdtemp()) / "checkpoint"
learner.save_state(saved, {"step": STEPS})
other = Learner(new_model("tiny", tokenizer, seed=1))
assert other.load_state(saved) == {"step": STEPS}

for one in (learner, other):
    one.forward_backward(pack([imitation(answers)], token_budget=4096))
    one.optim_step(lr=1e-3)
for mine, theirs in zip(learner.decoder.parameters(), other.decoder.parameters(), strict=True):
    assert torch.equal(mine, theirs)  # to the last bit

scorer.close()
