"""Memory plans made before a stage starts, compared with measured memory."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from task_cases import make_job, run_task

from perilune.bundle import machine
from perilune.bundle.plugin import MemoryNeed, load_plugin
from perilune.cli.train.plan import derive_plans
from perilune.engine.blocks import blocks_for
from perilune.engine.cache import PagedCache
from perilune.errors import RequestError
from perilune.files import write_json
from perilune.learn.training_settings import LearnerSettings
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS, DecoderConfig
from perilune.models.config.layer_kinds import DeltaRule
from perilune.models.decoder import Decoder
from perilune.models.logprobs import token_logprobs
from perilune.models.memory import (
    BLOCK,
    blocks_bytes,
    cache_bytes,
    get_model_card,
    learning_bytes,
    plan_memory,
)
from perilune.models.narrow import NarrowWeight
from perilune.models.native import ops
from perilune.recipe.load import load_recipe
from perilune.tasks.distill import loop
from perilune.tasks.flywheel import loop as flywheel
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage import evaluation
from perilune.tasks.stage.memory_plan import (
    ASSUMED_PROMPT_TOKENS,
    MAX_CACHE_BYTES,
    MAX_SLOTS,
    OTHER_PROCESSES,
    CacheSettings,
    StageMemory,
    engine_size,
    max_slots,
    plan_stage_memory,
)
from perilune.tasks.stage.stage import read_spec

TINY = PRESETS["tiny"]
WIDE = DecoderConfig(
    architecture="llama", vocab_size=700, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=24, tie_word_embeddings=False, attention_bias=True, mlp_bias=True,
)  # fmt: skip
QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_8B = QWEN3_0_6B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("config", [TINY, WIDE, TINY.replace(tie_word_embeddings=False)])
def test_parameter_count_matches_the_decoder(config: DecoderConfig) -> None:
    assert get_model_card(config).parameters == sum(p.numel() for p in Decoder(config).parameters())


def test_parameter_count_matches_the_published_model() -> None:
    assert (
        get_model_card(DecoderConfig.from_hf(QWEN3_0_6B)).parameters == 596_049_920
    )  # the model card says 0.6 billion


@pytest.mark.parametrize("config", [TINY, WIDE])
@pytest.mark.parametrize(("sequences", "length"), [(32, 32), (4, 256)])
def test_activation_memory_is_within_the_estimate(config: DecoderConfig, sequences: int, length: int) -> None:
    """Measured: all storages that autograd saves in a forward pass, each counted once, without weights."""
    decoder = Decoder(config)
    own = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(config.vocab_size, (sequences * length,))
    bounds = torch.arange(sequences + 1) * length
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = decoder(tokens, torch.arange(length).repeat(sequences), PackedAttention(bounds))
        logprobs, _ = token_logprobs(decoder.logits(hidden), tokens, 0.9)
    assert logprobs.requires_grad
    planned = learning_bytes(config, len(tokens), length)
    assert 0.5 * planned < sum(kept.values()) < planned


@pytest.mark.parametrize("config", [TINY, WIDE])
def test_cache_memory_equals_the_plan(config: DecoderConfig) -> None:
    cache = PagedCache(config, (1 + 8 * blocks_for(300),), torch.float32)
    assert cache.nbytes == cache_bytes(config, 8, 300)


def test_total_counts_only_the_largest_transient_memory() -> None:
    plan = plan_memory(TINY, sampling=(256, 64), learning=(4096, 64), reference=True)
    weights = 4 * get_model_card(TINY).parameters
    assert plan.persistent["weights"] == plan.persistent["reference"] == weights
    assert plan.persistent["moments"] == 2 * weights
    assert (
        plan.persistent["engine"] == weights + 4 * 98 * 96
    )  # the embedding counts twice, because it is also the output head
    assert plan.total == sum(plan.persistent.values()) + max(plan.transient.values())
    assert plan_memory(TINY, sampling=(256, 64)).transient.keys() == {"sampling"}
    assert str(plan).startswith(f"about {plan.total / 2**20:.0f} MiB: process ")


@pytest.fixture
def large(tmp_path: Path) -> dict[str, Any]:
    """A model folder with only a config.json."""
    write_json(tmp_path / "config.json", QWEN3_0_6B)
    return {"path": str(tmp_path)}


def derived(task: str, **options: Any) -> dict[str, str]:
    return {name: str(value) for name, value in load_plugin(task).plan(make_job(task, **options)).items()}


def test_plans_describe_the_amount_of_work() -> None:
    rl = derived("rl", steps=10, prompts=4, samples=8, max_tokens=20)
    assert rl["episodes"] == "10 steps x 4 tasks x 8 = 320"
    assert rl["tokens at most"] == "6,400"
    assert derived("sft", steps=6, batch_size=8)["traces seen"] == "6 steps x 8 = 48"
    assert derived("rl", steps=1, prompts=1, samples=2)["episodes"] == "1 step x 1 task x 2 = 2"
    assert derived("sft", steps=1, batch_size=8)["traces seen"] == "1 step x 8 = 8"
    evaluate = derived("evaluate", tasks=6, samples=4, max_tokens=10)
    assert evaluate["answers"] == "6 held-out tasks x (4 samples + 1 greedy) = 30"
    assert evaluate["tokens at most"] == "300"
    assert derived("collect", teacher="arithmetic") == {
        "traces": "40 verified, one per task, from the training split",
        "teacher": "arithmetic (40% scratchpad, 60% direct)",
    }


def test_memory_plan_needs_only_the_model_config(large: dict[str, Any]) -> None:
    rl = derived("rl", model=large, prompts=32, samples=8, max_tokens=256, kl=0.01)["memory"]
    # 256 samples of 512 tokens of 8 * 28 * 8 * 128 bytes would take 28 GiB, so fewer run at a time.
    assert "weights 2.2 GiB, engine 2.8 GiB, cache 3.9 GiB, reference 2.2 GiB, moments 4.4 GiB" in rl
    assert "learning 17.2 GiB or update 1.7 GiB" in rl
    few = derived("rl", model=large, prompts=2, samples=4, max_tokens=256, token_budget=512)["memory"]
    assert "cache 900 MiB" in few
    assert "learning 5.5 GiB" in few


def test_stage_that_does_not_fit_is_refused_with_a_fitting_budget(
    large: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan needs 33 GiB of 23 GiB. The suggested token budget fits, and one more token does not."""
    observed = machine.observe_machine()
    small = dataclasses.replace(observed, memory=machine.Memory(64 << 30, 23 << 30), gpus=())
    monkeypatch.setattr(machine, "observe_machine", lambda: small)
    options = {"model": large, "prompts": 8, "samples": 8, "max_tokens": 256, "kl": 0.01}
    job = make_job("rl", **options)
    need = load_plugin("rl").plan(job)["memory"]
    assert isinstance(need, MemoryNeed) and need.total > 23 << 30
    with pytest.raises(
        RequestError, match=r"the stage needs about 33\.\d GiB.*this machine has 23\.0 GiB"
    ) as refused:
        machine.require_memory(need, job.resources)
    fitting = int(refused.value.remedy.removeprefix("lower token_budget to "))
    for budget, fits in ((fitting, True), (fitting + 1, False)):
        need = load_plugin("rl").plan(make_job("rl", token_budget=budget, **options))["memory"]
        assert isinstance(need, MemoryNeed) and (need.total <= 23 << 30) == fits
    each = job.resources.model_copy(update={"processes": 4})
    with pytest.raises(RequestError, match=r"has 5\.\d GiB for each process") as refused:
        machine.require_memory(need, each)
    assert "lora" in refused.value.remedy, "no token budget helps"


@pytest.mark.parametrize("task", ["pairs", "rejection_sampling", "calibrate"])
def test_stages_that_only_sample_refuse_a_machine_without_the_memory(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = machine.observe_machine()
    small = dataclasses.replace(observed, memory=machine.Memory(1 << 20, 1 << 20), gpus=())
    monkeypatch.setattr(machine, "observe_machine", lambda: small)
    with pytest.raises(RequestError, match=r"the stage needs about .* this machine has 0\.0 GiB"):
        run_task(tmp_path, task)


def test_derive_refuses_a_stage_that_does_not_fit(
    large: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(
        f"name: large\nmodel: {{path: {large['path']}}}\n"
        "environment: {id: reasoning_gym, task: chain_sum}\n"
        "stages:\n  - {name: rl, task: rl, checkpoint: model, steps: 1, max_tokens: 256}\n"
    )
    observed = machine.observe_machine()
    small = dataclasses.replace(observed, memory=machine.Memory(8 << 30, 8 << 30), gpus=())
    monkeypatch.setattr(machine, "observe_machine", lambda: small)
    with pytest.raises(RequestError, match=r"^stages\.rl: memory: the stage needs about"):
        derive_plans(load_recipe(path))


def test_samples_in_flight_fit_the_cache() -> None:
    config = DecoderConfig.from_hf(QWEN3_0_6B)
    cpu = CacheSettings("auto", "bfloat16")  # on a CPU the cache stays float32
    slots = max_slots(config, 256, cpu)
    assert cache_bytes(config, slots, 512) <= MAX_CACHE_BYTES["cpu"] < cache_bytes(config, slots + 1, 512)
    room_of_all = engine_size(config, 256, cpu)
    assert room_of_all["slots"] == slots and room_of_all["cache_tokens"] >= slots * 512
    assert cache_bytes(config, 1, room_of_all["cache_tokens"]) <= MAX_CACHE_BYTES["cpu"]
    assert max_slots(TINY, 64, cpu) == MAX_SLOTS
    assert engine_size(TINY, 64, cpu)["cache_tokens"] == MAX_SLOTS * 320
    assert engine_size(TINY, 64, cpu, samples=24) == {"slots": 24, "cache_tokens": 24 * 320}
    long = config.replace(num_layers=1)  # few samples are planned, but the longest possible sample fits
    assert engine_size(long.replace(max_position_embeddings=200_000), 16, cpu)["cache_tokens"] == 200_000
    assert max_slots(config.replace(num_layers=10_000), 40_000, cpu) == 1


@pytest.mark.parametrize(("precision", "item"), [("float32", 4), ("bfloat16", 2)])
def test_gpu_slots_are_planned_for_the_expected_length(
    precision: Literal["float32", "bfloat16"], item: int
) -> None:
    config = DecoderConfig.from_hf(QWEN3_8B)
    room, expected = CacheSettings("cuda", precision), ASSUMED_PROMPT_TOKENS + 16_384 // 4
    slots = max_slots(config, 16_384, room)
    needed = [cache_bytes(config, count, expected, item) for count in (slots, slots + 1)]
    assert needed[0] <= MAX_CACHE_BYTES["cuda"] < needed[1]
    size = engine_size(config, 16_384, room)
    blocks = 1 + size["cache_tokens"] // BLOCK
    used = blocks_bytes(config, blocks, slots, item)
    assert used <= MAX_CACHE_BYTES["cuda"] < used + blocks_bytes(config, 3, slots, item)
    settings = LearnerSettings(precision=precision)
    plan = plan_stage_memory(config, samples=512, max_tokens=16_384, cache=room, learner=settings)
    assert plan.slots == slots and plan.persistent["cache"] == used
    few = plan_stage_memory(config, samples=4, max_tokens=256, cache=room, learner=settings)
    one = cache_bytes(config, 1, config.max_position_embeddings, item)  # room for the longest possible sample
    assert few.persistent["cache"] == one > cache_bytes(config, 4, 512, item)


def test_gpu_engine_stores_matrices_in_the_compute_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "is_available", lambda: False)  # plain tensors, as on a GPU
    config = PRESETS["small"]
    decoder = Decoder(config)
    decoder.set_precision("bfloat16")
    copy = decoder.frozen_copy()
    weights = [projection.frozen[0] for projection in copy.projections() if projection.frozen]
    stored = sum(matrix.values.nbytes for matrix in weights if isinstance(matrix, NarrowWeight))
    stored += copy.model.embed_tokens.weight.nbytes
    plan = plan_stage_memory(config, samples=4, max_tokens=64, cache=CacheSettings("cuda", "bfloat16"))
    norms = 2 * (2 * config.num_layers + 1) * config.hidden_size + 4 * config.num_layers * config.head_dim
    assert plan.persistent["engine"] == stored + norms  # the plan counts norms at two bytes, too


@pytest.mark.parametrize("task", ["rl", "evaluate"])
def test_plan_refuses_answers_that_leave_no_room_for_prompts(task: str, large: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="max_tokens: 40960 is too many: the model has 40960 positions"):
        derived(task, model=large, max_tokens=40960)
    derived(task, model=large, max_tokens=40959)


@pytest.mark.parametrize("task", ["rl", "sft", "evaluate"])
def test_plan_refuses_an_unsupported_model_type(task: str, large: dict[str, Any]) -> None:
    write_json(Path(large["path"]) / "config.json", QWEN3_0_6B | {"model_type": "mamba"})
    with pytest.raises(RequestError, match="model_type is 'mamba'"):
        derived(task, model=large)


def test_plan_counts_a_teacher_beside_an_adapter_and_a_reward_model(large: dict[str, Any]) -> None:
    weights = 4 * get_model_card(DecoderConfig.from_hf(QWEN3_0_6B)).parameters
    for options in ({}, {"lora": {"base": "int8"}}):
        distill = load_plugin("distill").plan(make_job("distill", model=large, **options))["memory"]
        assert isinstance(distill, StageMemory) and distill.persistent["reference"] == weights
    rl = load_plugin("rl").plan(make_job("rl", model=large, reward_model="scores"))["memory"]
    assert isinstance(rl, StageMemory) and rl.persistent["reward model"] == weights


def test_advice_on_the_budget_counts_the_parts_that_a_stage_adds(large: dict[str, Any]) -> None:
    need = load_plugin("rl").plan(make_job("rl", model=large, asynchronous={}, token_budget=4096))["memory"]
    assert isinstance(need, StageMemory) and need.persistent[OTHER_PROCESSES] > 1 << 30
    available = need.total - (1 << 30)
    fitting = int(need.fitting(available).removeprefix("lower token_budget to "))
    options = {"model": large, "asynchronous": {}, "token_budget": fitting}
    fits = load_plugin("rl").plan(make_job("rl", **options))["memory"]
    assert isinstance(fits, StageMemory) and fits.total <= available


def test_sharded_processes_on_a_cpu_divide_its_memory(
    large: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a whole copy of the weights, and an engine."""
    job = make_job("rl", model=large)
    need = load_plugin("rl").plan(job)["memory"]
    assert isinstance(need, StageMemory)
    observed = machine.observe_machine()
    memory = machine.Memory(need.total, need.total)
    monkeypatch.setattr(
        machine, "observe_machine", lambda: dataclasses.replace(observed, memory=memory, gpus=())
    )
    machine.require_memory(need, job.resources)
    both = job.resources.model_copy(update={"processes": 2, "sharded": True})
    with pytest.raises(RequestError, match="GiB for each process"):
        machine.require_memory(need, both)


def test_gpu_plan_counts_the_states_that_a_recomputed_layer_keeps() -> None:
    small = DeltaRule(layers=(0, 1), key_heads=1, heads=2, key_size=8, value_size=8)
    config = TINY.replace(architecture="qwen3_5_text", delta=small)
    large = config.replace(delta=dataclasses.replace(small, heads=64, key_size=128, value_size=128))
    few, many = (learning_bytes(c, 512, 8, recompute=True, gpu="float32") for c in (config, large))
    states = 64 * 64 * 128 * 128 * 4  # bytes of the states of one sequence in one layer
    assert many - few > 64 * states * 0.9


def test_asynchronous_training_on_several_machines_is_refused() -> None:
    job = make_job("rl", asynchronous={})
    load_plugin("rl").plan(job)
    several = job.model_copy(update={"resources": job.resources.model_copy(update={"nodes": 2})})
    with pytest.raises(RequestError, match="asynchronous training has one learner process"):
        load_plugin("rl").plan(several)


def test_rollout_processes_have_slots_for_the_groups_that_run_ahead() -> None:
    for ahead, workers, slots in ((0, 1, 6), (2, 1, 18), (1, 4, 4)):
        asynchronous = {"staleness": ahead, "workers": workers}
        spec = RLSpec(checkpoint="model", prompts=3, samples=2, asynchronous=asynchronous)
        engine = spec.sampling_plan(TINY, 8, "cuda")
        assert engine.slots == slots
        whole = spec.memory_plan(TINY, 8, "cuda")
        assert whole.persistent[OTHER_PROCESSES] == workers * engine.total


def test_engines_that_evaluate_distill_or_turn_the_flywheel_have_the_planned_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU allocates the cache of all slots at once."""

    def opened(*arguments: Any) -> None:
        raise LookupError(f"{arguments[3](TINY, 0, 'cuda').slots} slots")

    monkeypatch.setattr(evaluation, "make_engine", lambda *_, **options: options)
    monkeypatch.setattr(loop, "open_player", opened)
    monkeypatch.setattr(flywheel, "open_player", opened)
    job = make_job("sft", eval={"tasks": 3, "samples": 4})
    policy: Any = SimpleNamespace(decoder=SimpleNamespace(config=TINY), tokenizer=None)
    spec: Any = read_spec(load_plugin("sft").spec, job)  # type: ignore[attr-defined]
    made: Any = evaluation._evaluation_engine(spec, policy, job, None)
    assert made == {"samples": 12}
    job = make_job("distill", prompts=3, samples=2)
    spec = read_spec(load_plugin("distill").spec, job)  # type: ignore[attr-defined]
    with pytest.raises(LookupError, match="6 slots"):
        loop.run(None, spec)  # type: ignore[arg-type]
    job = make_job("flywheel", tasks=7, samples=2, heldout=5)
    spec = read_spec(load_plugin("flywheel").spec, job)  # type: ignore[attr-defined]
    with pytest.raises(LookupError, match="20 slots"):  # of the held-out tasks
        flywheel.run(None, spec)  # type: ignore[arg-type]
