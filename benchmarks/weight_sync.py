"""Measure the weights that a training step changes, and the cost to send them all or as a delta.

    python benchmarks/weight_sync.py [--model FOLDER ...] [--seeds 0 1 2]

Without --model it measures the presets `small` and `large` with new weights. Writes results/weight_sync.json.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.learn.optimizer import AdamW
from perilune.learn.training_settings import OptimizerSettings
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_model, save_checkpoint
from perilune.models.decoder import Decoder
from perilune.models.narrow import round_weight
from perilune.models.text.tokenizer import Tokenizer
from perilune.weights.delta import BoundsComparison, CopyComparison, Update, WeightReader, WeightWriter
from perilune.weights.precision import engine_dtypes
from perilune.weights.push import find_server
from recipe_runs import document, options, write

RATES = (1e-6, 3e-6, 1e-5, 1e-4, 1e-3)
STARTS = ("published", "trained")
PRECISIONS = ("float32", "bfloat16", "int8")
STEPS = 10
SEQUENCES, TOKENS = 4, 24
Kept = dict[str, dict[str, Tensor]]
ABOUT = f"""\
A delta sends only the weights that an update changed. The updates are AdamW steps with policy gradients, on
{SEQUENCES} sampled answers of {TOKENS} tokens per step with random advantages of +1 and -1.

*By learning rate* shows the share of values that the last of {STEPS} steps changed, and the bytes of a delta
divided by the bytes of all tensors. The columns are for engines that keep weights in float32, bfloat16 or
int8. Values are medians over seeds.

* `published`: training starts from weights that are exact in bfloat16, as most published checkpoints are, so
  each value begins in the middle of its rounding interval.
* `trained`: each value starts anywhere in its interval, as after long training.
* `smollm2-135m` is SmolLM2-135M-Instruct, dequantized from 4 bits, with one seed. It is trained for 5
  steps at 1e-6. Its row of each learning rate shows one more update in the direction of the last, scaled to
  this rate.

*Seconds* shows the time of an update. Through shared memory, it is CPU time to find the changes, write the
update and read it. With `keep_sent: false`, Perilune keeps no copy of the weights sent last. It recomputes
them by reversing the optimizer's update. Through HTTP, it is wall-clock time on a busy machine, for a push
to a server on the same machine, and includes loading the weights."""


def main() -> None:
    parser = options(__doc__, "weight_sync")
    parser.add_argument("--model", action="append", default=[], help="folder of a model, or a preset")
    arguments = parser.parse_args()
    began = time.monotonic()
    models = arguments.model or ["small", "large"]
    rows = [row for model in models for row in curve(model, arguments.seeds)]
    times = [row for model in models for row in costs(model)]
    write(arguments.out, report(rows, times) | document("weight_sync.py", sys.argv[1:], began))


class Training:
    """A model that is trained on random advantages.

    Args:
        start: "published" or "trained".
    """

    def __init__(self, model: str, start: str, seed: int) -> None:
        self.decoder, self.tokenizer = load(model, seed)
        self._random = torch.Generator().manual_seed(seed)
        size = self.decoder.config.vocab_size
        prompts = [
            Prompt(torch.randint(size, (4,), generator=self._random).tolist(), (seed, 0, i))
            for i in range(SEQUENCES)
        ]
        drawn = Engine(self.decoder, slots=SEQUENCES).sample(prompts, 1, SamplingParams(TOKENS))
        answers = [[*prompt.token_ids, *out.token_ids] for prompt, (out,) in zip(prompts, drawn, strict=True)]
        self._tokens = torch.tensor([token for answer in answers for token in answer])
        self._positions = torch.tensor([i for answer in answers for i in range(len(answer))])
        self._bounds = torch.tensor([0, *(len(answer) for answer in answers)]).cumsum(0)
        with torch.no_grad():
            for weight in self.decoder.parameters():
                weight.copy_(weight.bfloat16())
                if start == "trained":
                    # Half of the distance to the neighbors, 2^-8 of the power of two below the value.
                    _, exponent = torch.frexp(weight)
                    half = torch.ldexp(torch.ones_like(weight), exponent - 9)
                    weight.add_((torch.rand(weight.shape, generator=self._random) * 2 - 1) * 0.999 * half)
        settings = OptimizerSettings()
        self.optimizer = AdamW(
            {name: p.requires_grad_() for name, p in self.decoder.named_parameters()},
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            grad_clip=settings.grad_clip,
        )

    def kept(self) -> Kept:
        """The weights of an engine, by precision."""
        whole = {name: tensor.detach().clone() for name, tensor in self.decoder.state_dict().items()}
        return {precision: kept(whole, rounded(self.decoder), precision) for precision in PRECISIONS}

    @torch.no_grad()
    def further(self, done: float, lr: float) -> tuple[Kept, Kept]:
        """The weights before and after a step along the last one, whose learning rate was `done`."""
        before = self.kept()
        for name, weight in self.decoder.named_parameters():
            weight.sub_(self.optimizer._last_change(name) * (lr / done))
        after = self.kept()
        for name, weight in self.decoder.named_parameters():
            weight.copy_(before["float32"][name])
        return before, after

    def step(self, lr: float) -> None:
        """One update, with new advantages."""
        states = self.decoder(self._tokens, self._positions, PackedAttention(self._bounds))
        logprobs = self.decoder.logits(states[:-1]).float().log_softmax(-1)
        taken = logprobs.gather(1, self._tokens[1:, None])[:, 0]
        which = torch.bucketize(torch.arange(len(taken)), self._bounds[1:], right=True)
        signs = torch.randint(2, (SEQUENCES,), generator=self._random) * 2.0 - 1
        (-(signs[which] * taken).mean()).backward()
        self.optimizer.update(lr)


def load(model: str, seed: int) -> tuple[Decoder, Tokenizer]:
    """A preset with new weights, or a folder."""
    return load_model(model, seed=seed)


def kept(
    state: Mapping[str, Tensor], matrices: Mapping[str, torch.dtype], precision: str
) -> dict[str, Tensor]:
    """The weights that an engine holds in this precision."""
    if precision == "float32":
        return dict(state)
    if precision == "bfloat16":
        return {name: tensor.to(matrices.get(name, tensor.dtype)) for name, tensor in state.items()}
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name not in matrices or name == "model.embed_tokens.weight":
            result[name] = tensor.to(matrices.get(name, tensor.dtype))
        else:
            narrow = round_weight(tensor, "int8")
            assert narrow.scales is not None
            result |= {name: narrow.values, f"{name}.scales": narrow.scales}
    return result


def rounded(decoder: Decoder) -> dict[str, torch.dtype]:
    """Dtypes of an engine with bfloat16 products, by matrix. Training uses float32, which is faster."""
    decoder.set_precision("bfloat16")
    dtypes = engine_dtypes(decoder)
    decoder.set_precision("float32")
    return dtypes


def curve(model: str, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """Rows of the table: changed shares and sizes of the last step, by start and learning rate."""
    large = Path(model).exists()
    for start in STARTS[large:]:
        if large:
            trained = Training(model, start, seeds[0])
            for _ in range(STEPS // 2):
                trained.step(RATES[0])
        for lr in RATES:
            if large:
                pairs = [trained.further(RATES[0], lr)]
            else:
                pairs = [last_step(Training(model, start, seed), lr) for seed in seeds]
            row: dict[str, Any] = {"model": name_of(model), "start": start, "learning rate": lr}
            for precision in PRECISIONS:
                updates = [delta(before[precision], after[precision]) for before, after in pairs]
                row[f"{precision}: share changed"] = median(item.changed for item in updates)
                sizes = [sum(tensor.nbytes for tensor in after[precision].values()) for _, after in pairs]
                shares = (item.bytes / size for item, size in zip(updates, sizes, strict=True))
                row[f"{precision}: bytes of delta / all"] = median(shares)
            print(row, flush=True)
            yield row


def last_step(training: Training, lr: float) -> tuple[Kept, Kept]:
    """The weights of an engine before and after the last step."""
    for _ in range(STEPS - 1):
        training.step(lr)
    before = training.kept()
    training.step(lr)
    return before, training.kept()


def delta(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Update:
    """The update between two states."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        writer, changed = WeightWriter("delta"), CopyComparison()
        writer.write(Path(folder) / "before", before, 0, changed)
        return writer.write(Path(folder) / "after", after, 1, changed)


def costs(model: str) -> Iterator[dict[str, Any]]:
    """Seconds to write and read weights in bfloat16, whole and as a delta, and to push them to a server."""
    for lr in (1e-6,) if Path(model).exists() else (1e-6, 1e-4):
        training = Training(model, "trained", 0)
        training.step(lr)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            base = Path(folder) / "base"
            save_checkpoint(base, training.decoder, training.tokenizer)
            yield {"model": name_of(model), "learning rate": lr} | local(training, lr, Path(folder))
            save_checkpoint(Path(folder) / "next", training.decoder, training.tokenizer)
            print(pushes := served(base, Path(folder) / "next"), flush=True)
            yield {"model": name_of(model), "learning rate": lr} | pushes


def local(training: Training, lr: float, folder: Path) -> dict[str, Any]:
    """Seconds through shared memory."""
    dtypes = rounded(training.decoder)
    writer, changed, reader = WeightWriter("delta"), CopyComparison(), WeightReader(dtypes)
    before = writer.write(folder / "0", training.kept()["bfloat16"], 0, changed)
    state = {name: torch.empty_like(tensor) for name, tensor in training.decoder.state_dict().items()}
    load_into(state, reader, before.path)
    training.step(lr)
    new = training.kept()["bfloat16"]
    full, writing_full = timed(lambda: WeightWriter("full").write(folder / "full", new, 1))
    _, reading_full = timed(lambda: load_into(dict(state), WeightReader(dtypes), full.path))
    _, reversing = timed(
        lambda: [
            BoundsComparison(training.optimizer.bounds_before_update)(name, new[name].view(-1))
            for name in dtypes
        ]
    )
    update, writing = timed(lambda: writer.write(folder / "1", new, 1, changed))
    _, reading = timed(lambda: load_into(state, reader, update.path))
    return {
        "way": "shared memory",
        "whole, MB": full.bytes / 1e6,
        "delta, MB": update.bytes / 1e6,
        "whole, s": writing_full + reading_full,
        "delta, s": writing + reading,
        "to reverse the update, s": reversing,
    }


def load_into(state: dict[str, Tensor], reader: WeightReader, path: Path) -> None:
    """Read an update and copy its tensors, as a receiver does."""
    for name, tensor in reader.read(path, state).items():
        state[name].copy_(tensor)
    reader.commit()


def served(base: Path, folder: Path) -> dict[str, Any]:
    """Seconds to push to `perilune serve` over HTTP on this machine."""
    command = [str(Path(sys.executable).with_name("perilune")), "serve", str(base), "--port", "0"]
    command += ["--dtype", "bfloat16", "--weight-updates"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(line for line in process.stderr if " answers at " in line).split()[-1]
            server = find_server(url, None)
            small = server.push(folder, base, lambda sent, total: None)
            whole = server.push(base, None, lambda sent, total: None)
        finally:
            process.terminate()
    return {
        "way": "HTTP",
        "whole, MB": whole.bytes / 1e6,
        "delta, MB": small.bytes / 1e6,
        "whole, s": whole.seconds,
        "delta, s": small.seconds,
    }


def timed(work: Any) -> tuple[Any, float]:
    """The result of `work`, and its CPU seconds."""
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def name_of(model: str) -> str:
    """The name of a preset or folder, for the page."""
    path = Path(model)
    return path.name if path.exists() else model


def report(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> dict[str, Any]:
    """The document without its setting."""

    def spread(key: str, chosen: list[dict[str, Any]]) -> str:
        values = [row[key] for row in chosen]
        return f"{min(values):.3f} to {max(values):.3f}"

    *_, (local, pushed) = pairwise(times)
    low = [row for row in rows if row["learning rate"] <= 1e-5]
    findings = [
        f"Through shared memory, an update of {local['model']} takes {local['delta, s']:.2f} s as a delta and"
        f" {local['whole, s']:.2f} s whole: a delta saves only memory. Over HTTP on one machine, a push takes"
        f" {pushed['delta, s']:.1f} s as a delta and {pushed['whole, s']:.1f} s whole.",
        f"In float32 a delta has {spread('float32: bytes of delta / all', rows)} of the bytes, so the "
        "default `weights: auto` sends whole tensors.",
        f"In int8 {spread('int8: share changed', low)} of the values change at learning rates of at most "
        "1e-5.",
    ]
    return {
        "title": "Size of weight updates: deltas against whole weights",
        "about": ABOUT,
        "findings": findings,
        "by learning rate": rows,
        "seconds": times,
    }


if __name__ == "__main__":
    main()
