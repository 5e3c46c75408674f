"""Leads of the pages on speed: engines, kernels, training steps, weights and GPUs."""

from statistics import median

from .text import Document, Lead, Leads, change, count, listed, span


def generate(document: Document) -> Lead:
    ratios = [row["times_as_fast_as_generate"]["wall"] for row in document["results"]]
    parameters = document["model"]["parameters"] / 1e6
    return (
        f"Perilune's engine and `generate` of transformers sample from a model of {parameters:.1f} million "
        "parameters on one and two CPU threads.",
        f"Perilune's engine is {span(ratios, '.1f')} times as fast, by elapsed time.",
    )


def openvino(document: Document) -> Lead:
    ratios: dict[str, list[float]] = {}
    for row in document["speed"]:
        ratios.setdefault(row["weights"], []).append(row["tokens per CPU second, OpenVINO / Perilune"])
    return (
        "OpenVINO and Perilune's own kernels sample from SmolLM2-135M on one thread.",
        "By CPU time, OpenVINO is "
        + listed(
            [f"{span(values)} times as fast as the kernels in {name}" for name, values in ratios.items()]
        )
        + ".",
    )


def grpo_step(document: Document) -> Lead:
    ours, trl, ratio = (document[name] for name in ("perilune", "trl", "trl_over_perilune"))
    return (
        f"Perilune and TRL's GRPOTrainer take GRPO steps of {document['completions_per_step']} answers on "
        f"{count(document['threads'], 'CPU thread')}, from the same tiny model.",
        f"A median step takes {trl['seconds']['total']:.3f} s in TRL and {ours['seconds']['total']:.3f} s in "
        f"Perilune (time of TRL / time of Perilune: {ratio['seconds']['total']:g}).",
    )


def real_model(document: Document) -> Lead:
    step = {name: row["total_seconds"] for name, row in document["median step"].items()}
    ratio = document["time of TRL / time of Perilune"]
    return (
        "Perilune and TRL's GRPOTrainer take GRPO steps of SmolLM2-135M-Instruct, with 16 prompts x 8 "
        f"answers, on {count(document['threads'], 'CPU core')}.",
        f"A median step takes {step['trl']:.1f} s in TRL, {step['float32']:.1f} s in Perilune with float32 "
        f"products (time of TRL / time of Perilune: {ratio['float32']}), and {step['bfloat16']:.1f} s with "
        f"bfloat16 products ({ratio['bfloat16']}).",
    )


def matrix_products(document: Document) -> Lead:
    ratios = [row["speed of float32 kernel / speed of torch"] for row in document["GFLOP/s"]]
    return (
        "Perilune's C kernels and torch compute the same matrix products in float32 on one CPU thread.",
        f"Perilune's kernels are {span(ratios)} times as fast as torch, in CPU time.",
    )


def speculation(document: Document) -> Lead:
    gains: dict[str, list[float]] = {}
    for row in document["one sample"]:
        gains.setdefault(row["arm"], []).append(row["speed / speed of off"])
    lookup, draft = gains["lookup"], gains["int8 draft"]
    return (
        "SmolLM2-135M-Instruct answers four prompts on one CPU thread, with and without speculative "
        "decoding.",
        f"A single sample is {span(lookup)} times as fast with draft tokens that repeat earlier text, and "
        f"{span(draft)} times as fast with an int8 copy of the model as draft.",
    )


def prefix_cache(document: Document) -> Lead:
    model = document["hits"][-1]["model"]
    hits = {row["rule"]: median(row["share of hits"]) for row in document["hits"] if row["model"] == model}
    (speed,) = document["offloading"]

    def store(model: str) -> str:
        """The smallest store with 90% of the hits of unlimited pools."""
        rows = [row for row in document["hits"] if row["model"] == model and "store" in row["rule"]]
        return next(row["rule"] for row in rows if row["hits / hits of unlimited"] >= 0.9)

    return (
        "Conversations of agents that pause between turns use a prefix cache with space for a quarter of "
        "their tokens, in a simulation and on the engine.",
        f"In a model with attention windows, {hits['plain LRU']:.0%} of the prompt tokens are found in the "
        f"cache with plain LRU, {hits['tail rule']:.0%} with the engine's rule of eviction and "
        f"{hits['announced']:.0%} if requests announce their pauses; a {store(model)} of all bytes in "
        f"host memory reaches 90% of the hits of unlimited pools (full attention: a "
        f"{store(document['hits'][0]['model'])}), and offloading changes the CPU time of {speed['model']} "
        f"from {speed['seconds without offloading']:.1f} s to {speed['seconds with offloading']:.1f} s.",
    )


def weight_sync(document: Document) -> Lead:
    rows = document["by learning rate"]

    def ratios(low: float, high: float) -> list[float]:
        return [row["bfloat16: bytes of delta / all"] for row in rows if low <= row["learning rate"] <= high]

    return (
        "Weight updates of AdamW steps are sent to the sampler as deltas, which hold only the changed "
        "values, or as whole tensors.",
        f"With bfloat16 weights, a delta has {span(ratios(0, 1e-5), '.1%')} of the bytes of the whole "
        f"tensors at learning rates of at most 1e-5, and {span(ratios(1e-3, 1e-3), '.0%')} at 1e-3.",
    )


def processes(document: Document) -> Lead:
    arms = document["seconds per step"]
    times = [f"{median(row['total']):.2f} s with {name}" for name, row in arms.items()]
    return (
        "A GRPO step of the quickstart runs in one process with one or two threads, and in two processes.",
        f"A median step takes {listed(times)}, on cores that other programs kept busy.",
    )


def grpo_cuda(document: Document) -> Lead:
    if cases := document.get("cases"):
        times = [f"{row['total_seconds']:.1f} s with {name}" for name, row in cases.items()]
        return (
            f"`perilune run` takes GRPO steps of models with up to 8 billion parameters on one "
            f"{document['machine']['device']}.",
            f"A median step takes {listed(times)}.",
        )
    steps = document["steps"][1:]  # the first step compiles kernels
    machine, memory = document["machine"], document["memory"]
    return (
        "`perilune run` takes GRPO steps of a model with the shape of Qwen3-1.7B, with 8 prompts x 8 answers "
        f"of up to 2,048 tokens, on one {machine['device']}.",
        f"A step takes {span((row['total_seconds'] for row in steps), '.1f')} s after the first, of which "
        f"sampling takes {span((row['sampling_seconds'] for row in steps), '.1f')} s and learning "
        f"{span((row['learning_seconds'] for row in steps), '.1f')} s, and the card uses "
        f"{memory['card_gib']:g} GiB of memory.",
    )


def rollout_cuda(document: Document) -> Lead:
    rates: dict[tuple[str, str], dict[str, float]] = {}
    for workload in ("group", "ragged", "single"):
        for row in document.get(workload, []):
            rates.setdefault((workload, row["model"]), {})[row["engine"]] = row["tokens_per_second"]
    ratios = [rate["perilune"] / rate["transformers, static cache"] for rate in rates.values()]
    return (
        "Perilune's engine and compiled `generate` of transformers with a static cache sample the same work "
        f"on one {document['machine']['device']}.",
        f"Perilune's engine is {span(ratios)} times as fast, by elapsed time.",
    )


def passes_cuda(document: Document) -> Lead:
    shares = [row["share_of_best_rate"] for row in document["training"] if row["precision"] == "bfloat16"]
    rates, samples = ([row[key] for row in document["decoding"]] for key in ("tokens_per_second", "samples"))
    return (
        "Training passes and decoding steps run on models with the shapes of Qwen3-0.6B, 1.7B and 8B, on one "
        f"{document['machine']['device']}.",
        f"In bfloat16, a training pass reaches {span(shares, '.0%')} of the FLOP/s of one large matrix "
        f"product, and the 1.7B shape decodes {span(rates, ',.0f')} tokens per second for "
        f"{span(samples, 'd')} samples.",
    )


def smollm2_cuda(document: Document) -> Lead:
    first, *_, last = document["reinforcement_learning"]
    return (
        "The bundled recipe `smollm2/arithmetic` trains SmolLM2-135M on one "
        f"{document['machine']['device']}.",
        f"In RL, the pass rate on training tasks goes from {first['pass_rate']:.1%} in steps "
        f"{first['steps']} to {last['pass_rate']:.1%} in steps {last['steps']} (one seed).",
    )


def vllm_server(document: Document) -> Lead:
    ratios = [median(row["speed of Perilune's engine / speed of vLLM server"]) for row in document["speed"]]
    difference = change(document["comparisons"][2])
    return (
        "Perilune's engine and a vLLM server sample from SmolLM2-135M in float32 on two CPU threads, and a "
        "tiny model learns from samples of either.",
        f"Perilune's engine is {span(ratios)} times as fast, and the difference of pass@1 after RL, vLLM "
        f"minus Perilune, is {difference}.",
    )


LEADS: Leads = {
    "engine_vs_generate": generate,
    "grpo_cuda": grpo_cuda,
    "grpo_step_vs_trl": grpo_step,
    "matrix_products": matrix_products,
    "openvino": openvino,
    "passes_cuda": passes_cuda,
    "prefix_cache": prefix_cache,
    "processes": processes,
    "real_model": real_model,
    "rollout_cuda": rollout_cuda,
    "smollm2_cuda": smollm2_cuda,
    "speculation": speculation,
    "vllm_server": vllm_server,
    "weight_sync": weight_sync,
}
