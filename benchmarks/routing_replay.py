"""Measure routing replay (R3): sampler-learner gap, training with and without it, and transfer of routes.

    python benchmarks/routing_replay.py [--seeds 0 1 2] [--steps 40]
    python benchmarks/routing_replay.py --transport   # only the last part, into an existing result

For each seed a small Qwen3-MoE is trained on worked additions. On a CPU, sampler and learner agree to the bit
in float32, so the gap is made on purpose: the engine rounds its weights to bfloat16 or int8, or the learner
is two updates ahead. Then the model is trained with GRPO from such engines, with and without replay. Last,
the learner's process receives groups of 16k to 1.6M tokens from a rollout process.
Writes results/routing_replay.json.
"""

import copy
import gc
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from perilune.data.episode import Episode
from perilune.data.episodes_file import episodes_to_bytes
from perilune.engine.engine import Engine
from perilune.engine.native_runner import NativeRunner
from perilune.engine.request import Prompt, SamplingParams
from perilune.environments.core.protocol import Environment, Task, Transcript
from perilune.environments.core.registry import make_environment
from perilune.learn.algorithms import algorithm
from perilune.learn.algorithms.base import StepContext
from perilune.learn.algorithms.sft import SFT
from perilune.learn.batch import minibatches, pack
from perilune.learn.figures import Figures
from perilune.learn.replay import RouteReplay
from perilune.learn.trainer import Learner, predicting_states, target_logprobs, token_logprobs
from perilune.models.checkpoints.loading import load_checkpoint, new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.groups import map_groups
from recipe_runs import HERE, SEEDS_ARE_THE_UNIT, describe_differences, document, options, run_recipe, write

RECIPE = HERE / "cold_start.yaml"
MIXTURE = PRESETS["tiny"].replace(architecture="qwen3_moe", num_layers=4, experts=Experts(16, 2, 48))
SFT_STEPS = 300
PROMPTS, SAMPLES, MAX_TOKENS = 16, 8, 64
UPDATES = 3  # per batch, so the last update trains on tokens that are two versions old
LR = 3e-4
HELD_OUT, ANSWERS = 256, 4
KINDS = ("bfloat16", "int8")
LAYERS, EXPERTS, PER_TOKEN = 48, 128, 8  # of Qwen3-30B-A3B
RECEIVING = "Receiving a group"  # begins the finding
GROUP = 16  # episodes of a transferred group
SIZES = (16_000, 160_000, 1_600_000)  # tokens of a group
REPEATS, PICKLE_REPEATS = 201, 3
WARMUP = 10  # repeats that are left out
TRANSPORT = "receiving a group in the learner's process"

Groups = list[list[Episode]]


@dataclass(frozen=True)
class Start:
    """A trained mixture and its tasks."""

    decoder: Decoder
    tokenizer: Tokenizer
    environment: Environment
    seed: int

    def tasks(self, split: str) -> Iterator[Task]:
        return iter(self.environment.tasks(split, self.seed))


class Sampler:
    """An engine that holds one kind of weights and records routes."""

    def __init__(self, start: Start, decoder: Decoder, kind: str) -> None:
        self._start = start
        weights = None if kind == "float32" else kind
        self.engine = Engine(decoder, runner=partial(NativeRunner, weights=weights, cache="float32"))
        self.engine.record_routes()
        self._params = SamplingParams(MAX_TOKENS, stop_token_ids=decoder.config.eos_token_ids)

    def play(self, tasks: Sequence[Task], samples: int, step: int) -> Groups:
        """Sample and score groups."""
        start = self._start
        ids = start.tokenizer.encode_prompts([task.prompt for task in tasks])
        prompts = [Prompt(prompt, (start.seed, step, index)) for index, prompt in enumerate(ids)]
        answers = self.engine.sample(prompts, samples, self._params)
        groups = []
        for index, (task, group) in enumerate(zip(tasks, answers, strict=True)):
            episodes = []
            for number, item in enumerate(group):
                text = start.tokenizer.decode(item.token_ids.tolist())
                score = start.environment.score(task, Transcript(text, finished=item.finish_reason == "stop"))
                episode = Episode.from_completion(
                    task, item, start.tokenizer, score, group_id=f"{step}/{index}", sample=number
                )
                episodes.append(replace(episode, routed_experts=item.routed_experts))
            groups.append(episodes)
        return groups


def main() -> None:
    parser = options(__doc__, "routing_replay")
    parser.add_argument("--steps", type=int, default=40, help="of training")
    parser.add_argument("--transport", action="store_true", help="measure only the transfer of routes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    if arguments.transport:
        replace_transport(arguments.out)
        return
    transport = measure_transport()
    gaps, climbs = [], []
    for seed in arguments.seeds:
        start = cold_start(seed)
        gaps += measure_gaps(start)
        climbs.append({kind: climb_both(start, kind, arguments.steps) for kind in KINDS})
        print(json.dumps({"seed": seed, "gaps": gaps[-4:], "climb": climbs[-1]}), file=sys.stderr)
    findings, comparisons = compare_climbs(climbs)
    result = {
        "title": "Routing replay: sampler-learner gap, training, and transfer of routes",
        "about": ABOUT,
        "findings": [*describe_gaps(gaps), *findings, *describe_transport(transport)],
    }
    tables = {
        "gap between sampler and learner": gaps,
        "training runs": [climb_row(kind, climbs) for kind in KINDS],
        "comparison of pass@1": comparisons,
        TRANSPORT: transport,
    }
    setting = {"steps": arguments.steps, "updates per step": UPDATES, "learning rate": LR}
    write(
        arguments.out,
        result | tables | setting | document("routing_replay.py", sys.argv[1:], began),
    )


ABOUT = f"""\
The model is a Qwen3-MoE of 1 million parameters (4 layers, 16 experts, 2 per token), trained on additions.
Sampler and learner differ because the engine keeps its weights in bfloat16 or int8 and the learner in
float32, or because the learner has made two updates since sampling.

* The *gap* is the difference between the log-probs of sampler and learner on sampled tokens, in nats.
* The *KL* is the k3 estimate of KL(sampler ‖ learner), in nats.
* A token has a *flipped expert* if, in at least one layer, the learner's router would choose other experts
  than the engine used.
* In the table *Training runs*, each step samples {PROMPTS} tasks with {SAMPLES} answers and makes {UPDATES}
  updates, so the weights that sampled a token are up to two updates old. pass@1 is measured on held-out tasks
  in float32. Runs with and without replay start from the same weights and see the same tasks.
* *Receiving a group in the learner's process* shows the CPU time that the learner's process needs to receive
  a group of {GROUP} episodes from a rollout process. The episodes have the routes of a model like
  Qwen3-30B-A3B (48 layers, 8 of 128 experts per token).
* {SEEDS_ARE_THE_UNIT}"""


def cold_start(seed: int) -> Start:
    """A new mixture after supervised training."""
    with tempfile.TemporaryDirectory(prefix="perilune-routing-") as home:
        tokenizer, model = Tokenizer.characters(), Path(home) / "mixture"
        save_checkpoint(model, new_model(MIXTURE, tokenizer, seed), tokenizer)
        changes = [f"model={{path: {model}}}", f"sft.steps={SFT_STEPS}"]
        stages = run_recipe(RECIPE, seed, changes, Path(home) / "runs")
        decoder, tokenizer = load_checkpoint(stages["sft"]["folder"] / "artifacts" / "checkpoints" / "final")
    environment = make_environment(yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["environment"])
    return Start(decoder, tokenizer, environment, seed)


# -- the gap ------------------------------------------------------------------------------------------------


def measure_gaps(start: Start) -> list[dict[str, Any]]:
    """Rows of figures for every engine, and for a learner two updates ahead."""
    tasks = list(islice(start.tasks("train"), 4 * PROMPTS))
    rows = []
    for kind in ("float32", *KINDS):
        groups = Sampler(start, start.decoder, kind).play(tasks[:PROMPTS], SAMPLES, 1)
        rows.append(
            {"seed": start.seed, "engine": kind, "updates since sampling": 0} | gap(start.decoder, groups)
        )
    decoder = copy.deepcopy(start.decoder)
    learner, sampler = Learner(decoder), Sampler(start, decoder, "float32")
    groups = sampler.play(tasks[:PROMPTS], SAMPLES, 1)
    for step in range(2):
        sampler.engine.update_weights(None, learner.version)
        part = tasks[(step + 1) * PROMPTS : (step + 2) * PROMPTS]
        update(learner, sampler.play(part, SAMPLES, step + 2), 1)
    rows.append({"seed": start.seed, "engine": "float32", "updates since sampling": 2} | gap(decoder, groups))
    return rows


def gap(decoder: Decoder, groups: Groups) -> dict[str, float]:
    """Log-prob differences of sampler and learner, with the learner's own and with replayed routes."""
    everything = SFT().weight_groups(groups, StepContext(max_tokens=0))
    own, replayed, figures = [], [], Figures()
    for batch in pack(everything, 1 << 20):
        assert batch.routes is not None
        replay = RouteReplay(batch.routes)
        with torch.no_grad():
            states = predicting_states(decoder, batch, replay)
            replayed.append(batch.sampler_logprobs - target_logprobs(decoder, batch, states)[0])
        own.append(batch.sampler_logprobs - token_logprobs(decoder, replace(batch, routes=None)))
        replay.add_figures(figures)
    flipped, count = figures.read()["routing/flipped"]
    parts = {"without replay": torch.cat(own).double(), "with replay": torch.cat(replayed).double()}
    return {
        "tokens with a flipped expert": flipped / count,
        **{f"mean gap, {name}": float(gaps.abs().mean()) for name, gaps in parts.items()},
        **{f"largest gap, {name}": float(gaps.abs().max()) for name, gaps in parts.items()},
        **{f"KL, {name}": float((gaps.neg().exp() - 1 + gaps).mean()) for name, gaps in parts.items()},
    }


def describe_gaps(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for engine, since in (("float32", 0), ("bfloat16", 0), ("int8", 0), ("float32", 2)):
        chosen = [row for row in rows if (row["engine"], row["updates since sampling"]) == (engine, since)]
        flipped = statistics.fmean(row["tokens with a flipped expert"] for row in chosen)
        begins = (
            f"Engine in {engine}, {since} updates since sampling:"
            f" {flipped:.2%} of tokens have a flipped expert"
        )
        if any(row["mean gap, without replay"] for row in chosen):
            gap_left, kl_left = left(chosen, "mean gap"), left(chosen, "KL")
            yield (
                f"{begins}. The mean gap with replay is {gap_left} of that without replay, and the KL is"
                f" {kl_left} (means over seeds)."
            )
        else:
            yield f"{begins}. The gap is exactly 0 with replay and without."


def left(rows: Sequence[dict[str, Any]], name: str) -> str:
    """The mean over seeds of a figure with replay, divided by that without replay."""
    shares = [row[f"{name}, with replay"] / row[f"{name}, without replay"] for row in rows]
    return f"{statistics.fmean(shares):.0%}"


# -- the climb ----------------------------------------------------------------------------------------------


def climb_both(start: Start, kind: str, steps: int) -> dict[str, dict[str, Any]]:
    """Train with this kind of engine, with and without replay."""
    return {
        name: climb(start, kind, steps, replays=replays)
        for name, replays in (("without replay", False), ("with replay", True))
    }


def climb(start: Start, kind: str, steps: int, *, replays: bool) -> dict[str, Any]:
    """Train with RL, and return rewards, mean KL to the sampler, and pass@1 afterwards."""
    decoder = copy.deepcopy(start.decoder)
    learner, sampler = Learner(decoder), Sampler(start, decoder, kind)
    tasks, rewards, divergence = start.tasks("train"), [], []
    for step in range(steps):
        sampler.engine.update_weights(None, learner.version)
        groups = sampler.play(list(islice(tasks, PROMPTS)), SAMPLES, step + 1)
        rewards.append(statistics.fmean(episode.reward or 0.0 for group in groups for episode in group))
        if not replays:
            groups = [[replace(episode, routed_experts=None) for episode in group] for group in groups]
        divergence.append(update(learner, groups, UPDATES))
    judge = Sampler(start, decoder, "float32")
    held_out = list(islice(start.tasks("heldout"), HELD_OUT))
    final = [episode.reward or 0.0 for group in judge.play(held_out, ANSWERS, 0) for episode in group]
    return {
        "rewards": rewards,
        "KL": statistics.fmean(divergence),
        "pass@1": statistics.fmean(float(reward >= 1) for reward in final),
    }


def update(learner: Learner, groups: Groups, count: int) -> float:
    """Make the updates of a step, and return the mean KL(sampler || learner) before them."""
    weighted = algorithm("grpo").weight_groups(groups, StepContext(max_tokens=MAX_TOKENS))
    divergence = []
    for part in minibatches(weighted, count):
        if batches := pack(part, 1 << 14):
            divergence.append(learner.forward_backward(batches)["kl_behaviour_k3"])
            learner.optim_step(LR)
    return statistics.fmean(divergence) if divergence else 0.0


def climb_row(kind: str, climbs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": kind}
    for arm in ("without replay", "with replay"):
        of_arm = [climb[kind][arm] for climb in climbs]
        row[f"first reward, {arm}"] = [statistics.fmean(climb["rewards"][:5]) for climb in of_arm]
        row[f"last reward, {arm}"] = [statistics.fmean(climb["rewards"][-5:]) for climb in of_arm]
        row[f"pass@1, {arm}"] = [climb["pass@1"] for climb in of_arm]
        row[f"KL, {arm}"] = [climb["KL"] for climb in of_arm]
    return row


def compare_climbs(climbs: Sequence[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    if len(climbs) < 2:
        return [], []
    return describe_differences(
        {
            f"pass@1 with replay against without, {kind} engine": [
                climb[kind]["with replay"]["pass@1"] - climb[kind]["without replay"]["pass@1"]
                for climb in climbs
            ]
            for kind in KINDS
        }
    )


# -- the transport ------------------------------------------------------------------------------------------


def replace_transport(path: Path) -> None:
    """Measure the transport again, and replace its rows and its finding in a result."""
    result, rows = json.loads(path.read_text(encoding="utf-8")), measure_transport()
    findings = [text for text in result["findings"] if not text.startswith(RECEIVING)]
    write(path, result | {"findings": [*findings, *describe_transport(rows)], TRANSPORT: rows})


def measure_transport() -> list[dict[str, Any]]:
    """CPU milliseconds to receive a group with and without routes, and its bytes, for each size."""
    with tempfile.TemporaryDirectory(prefix="perilune-routing-") as folder:
        rows, works = [], dict[tuple[int, str], Callable[[], object]]()
        for size in SIZES:
            plain = synthetic_group(size // GROUP)
            routed = [with_routes(episode) for episode in plain]
            sizes = []
            for name, episodes in (("with", routed), ("without", plain)):
                path = Path(folder) / f"{size}-{name}.arrow"
                path.write_bytes(episodes_to_bytes(episodes))
                works[size, name] = partial(receive, path)
                sizes.append(path.stat().st_size)
            pickled = {"": partial(pickle.loads, pickle.dumps(routed))}
            rows.append(
                {
                    "tokens": size,
                    "as a pickle (ms)": milliseconds(pickled, PICKLE_REPEATS)[""],
                    "payload (MB)": sizes[0] / 1e6,
                    "share of routes": 1 - sizes[1] / sizes[0],
                }
            )
            del pickled, routed, plain
        gc.collect()
        times = milliseconds(works, REPEATS)
    return [
        {
            "tokens": row["tokens"],
            "with routes (ms)": times[row["tokens"], "with"],
            "without routes (ms)": times[row["tokens"], "without"],
        }
        | row
        for row in rows
    ]


def receive(path: Path) -> None:
    """Read the message of a finished group, as the learner's process does."""
    message = json.loads(json.dumps({"group": [1, 0], "file": str(path)}))
    for group in map_groups(Path(message["file"])):
        for episode in group:
            assert episode.routed_experts is None or len(episode.routed_experts)


def milliseconds(works: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Median CPU milliseconds of each work, in turns, so that drift of the machine affects all alike."""
    times: dict[Any, list[float]] = {name: [] for name in works}
    gc.disable()  # a collection visits all objects of the process, whatever the work
    for repeat in range(repeats):
        for name, work in works.items():
            began = time.process_time()
            work()
            if repeat >= min(WARMUP, repeats - 1):
                times[name].append(time.process_time() - began)
    gc.enable()
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def synthetic_group(tokens: int) -> list[Episode]:
    """Episodes of that many tokens, without text."""
    answer = tokens // 2
    return [
        Episode(
            f"1/0/{sample}", "1/0", "task", "synthetic", 0, ({"role": "user", "content": "question"},),
            np.zeros(tokens - answer, np.int32), np.zeros(answer, np.int32), np.ones(answer, np.bool_),
            np.zeros(answer, np.float32), np.zeros(answer, np.int32), "stop", reward=1.0,
        )
        for sample in range(GROUP)
    ]  # fmt: skip


def with_routes(one: Episode) -> Episode:
    rows = len(one.prompt_ids) + len(one.token_ids) - 1
    random = np.random.default_rng(0)
    routes = random.integers(EXPERTS, size=(rows, LAYERS, PER_TOKEN), dtype=np.uint8)
    return replace(one, routed_experts=routes)


def describe_transport(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    extra = max(abs(row["with routes (ms)"] - row["without routes (ms)"]) for row in rows)
    first, last = rows[0], rows[-1]
    yield (
        f"{RECEIVING} takes {first['with routes (ms)']:.2f} ms of CPU time with 16,000 tokens and"
        f" {last['with routes (ms)']:.2f} ms with 1,600,000. The routes change this time by at most"
        f" {extra:.2f} ms, although they are {first['share of routes']:.1%} of the payload. As a pickle, the"
        f" group of 1,600,000 tokens takes {last['as a pickle (ms)']:.0f} ms."
    )


if __name__ == "__main__":
    main()
