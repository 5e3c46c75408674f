"""Keys of TRL, transformers, PEFT and verl, and former keys of recipes, with our keys that mean the same.

The error for an unknown key that is listed here names the recipe's key or another remedy. Recipes do not
accept the aliases: one setting has one name.
"""

from collections.abc import Collection, Mapping

ALIASES: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("lr",),
    "warmup_steps": ("warmup",),
    "lr_scheduler_type": ("schedule",),
    "adam_beta2": ("beta2",),
    "max_grad_norm": ("grad_clip",),
    "clip_grad": ("grad_clip",),
    "max_steps": ("steps",),
    "total_training_steps": ("steps",),
    "save_steps": ("save_every",),
    "save_freq": ("save_every",),
    "save_total_limit": ("keep",),
    "gradient_checkpointing": ("activation_checkpointing",),
    "enable_gradient_checkpointing": ("activation_checkpointing",),
    "bf16": ("precision",),
    "torch_dtype": ("precision",),
    "per_device_train_batch_size": ("batch_size", "prompts"),
    "train_batch_size": ("batch_size", "prompts"),
    "batch_size": ("prompts",),
    "ppo_max_token_len_per_gpu": ("token_budget",),
    "ppo_mini_batch_size": ("updates_per_batch",),
    "num_iterations": ("epochs_per_batch",),
    "ppo_epochs": ("epochs_per_batch",),
    "max_staleness": ("asynchronous",),
    "staleness_threshold": ("asynchronous",),
    "max_off_policy_steps": ("asynchronous",),
    "num_generations": ("samples",),
    "rollout_n": ("samples",),
    "max_completion_length": ("max_tokens",),
    "max_response_length": ("max_tokens",),
    "max_new_tokens": ("max_tokens",),
    "beta": ("kl",),
    "kl_coef": ("kl",),
    "kl_loss_coef": ("kl",),
    "kl_loss_type": ("kl_estimator",),
    "entropy_coeff": ("entropy_bonus",),
    "vf_coef": ("value_weight",),
    "cliprange_value": ("value_clip",),
    "epsilon": ("clip_low", "ratio_min"),
    "clip_ratio": ("clip_low", "ratio_min"),
    "epsilon_high": ("clip_high", "ratio_max"),
    "clip_ratio_high": ("clip_high", "ratio_max"),
    "mask_truncated_completions": ("mask_truncated",),
    "loss_type": ("algorithm", "loss"),
    "adv_estimator": ("algorithm",),
    "loss_agg_mode": ("aggregation",),
    "model_name_or_path": ("path", "model"),
    "pretrained_model_name_or_path": ("path",),
    "dataset_name": ("data",),
    "dataset_path": ("data",),
    "max_seq_length": ("max_length",),
    "train_dataset": ("data",),
    "train_files": ("data",),
    "system_prompt": ("system",),
    "reward_funcs": ("rewards",),
    "reward_weights": ("rewards",),
    "report_to": ("tracking",),
    "peft_config": ("lora",),
    "r": ("rank",),
    "lora_r": ("rank",),
    "lora_rank": ("rank",),
    "lora_alpha": ("alpha",),
    "target_modules": ("targets",),
    "calls": ("calls_per_block",),  # before 22 November 2026
}

_CLIP = "algorithm: {name: grpo, clip_low: 0.2, clip_high: 0.28}"
_REWARDS = "rewards, a top-level key of the recipe: {mine: {function: 'file.py:name'}}"
_EPOCHS = "steps, which is epochs x rows / batch_size; --plan prints the number of epochs"
_BATCH = "batch_size, the rows of a whole step; in rl, prompts x samples. token_budget limits the memory"
_PACKED = "leave it out: rows are packed without padding, and the loss is on the assistant's messages"
_SAMPLER = "leave it out: Perilune has its own sampling engine; engine: {url: ...} samples from a server"
_WHOLE = (
    "leave it out: training samples from the whole distribution, because the learner's log-probs would not be"
    " those of a truncated one; temperature is possible; evaluate has sampling: {top_p: 0.9}"
)
_REFERENCE = (
    "leave it out: the reference is the checkpoint that the stage starts from; to renew it, chain two stages"
)
_EVALUATION = "eval: {every: 10, tasks: 64}"
_BEST = "eval: {every: 10, best: heldout/pass@1, output: best}"
_NO_DROPOUT = "leave it out: there is no dropout, because the policy that samples would be another one"
_NONE = "leave it out: Perilune has no such option"
REMEDIES: Mapping[str, str] = {
    "epsilon": _CLIP,
    "epsilon_high": _CLIP,
    "clip_ratio": _CLIP,
    "delta": "algorithm: {name: grpo, dual_clip: 3.0}",
    "mask_truncated_completions": "algorithm: {name: grpo, mask_truncated: true}",
    "importance_sampling_level": "algorithm: gspo",
    "train_dataset": "environment, a top-level key of the recipe: {id: jsonl, path: questions.jsonl}",
    "reward_funcs": _REWARDS,
    "reward_weights": _REWARDS,
    "num_train_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "gradient_accumulation_steps": _BATCH,
    "packing": _PACKED,
    "assistant_only_loss": _PACKED,
    "completion_only_loss": _PACKED,
    "padding_free": _PACKED,
    "use_vllm": _SAMPLER,
    "vllm_mode": _SAMPLER,
    "vllm_gpu_memory_utilization": _SAMPLER,
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"), _WHOLE),
    **dict.fromkeys(("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"), _REFERENCE),
    **dict.fromkeys(("eval_strategy", "eval_steps"), _EVALUATION),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), _BEST),
    **dict.fromkeys(("lora_dropout", "disable_dropout"), _NO_DROPOUT),
    **dict.fromkeys(("eos_token", "pad_token", "optimizers", "label_smoothing", "reference_free"), _NONE),
    "scale_rewards": "algorithm: {name: dr_grpo, aggregation: token-mean}, which does not divide by the"
    " standard deviation",
    "max_prompt_length": "leave it out: prompts are never truncated",
    "warmup_ratio": "warmup, in steps",
    "generation_batch_size": "prompts x samples, the answers of a step; updates_per_batch splits them",
    "steps_per_generation": "updates_per_batch",
    "num_generations_eval": "eval: {samples: 4}",
    "quantization_config": "lora: {base: int8}",
    "load_in_4bit": "lora: {base: int8}",
    "load_in_8bit": "lora: {base: int8}",
    **dict.fromkeys(("task_type", "bias", "use_rslora", "use_dora", "modules_to_save"), _NONE),
    "fp16": "precision: bfloat16",
    "rpo_alpha": "nll",
    "logging_steps": "leave it out: every step is logged",
    "log_completions": "leave it out: every answer is recorded; `perilune report` shows them",
    "seed": "seed, a top-level key of the recipe",
    "run_name": "name, a top-level key of the recipe",
    "dataset_text_field": "leave it out: the column is named text",
    "chat_template_path": "model: {chat_template: template.jinja}, a top-level key of the recipe",
    "push_to_hub": "leave it out: `perilune model export` writes the model",
    "report_to": "tracking: [tensorboard, wandb, mlflow], a top-level key of the recipe",
    "output_dir": "leave it out: runs are in ~/.perilune, and `perilune model export` writes the model",
    "resume_from_checkpoint": "leave it out: the same command resumes the run",
    "eval_dataset": "a stage with task: evaluate; validation in a supervised stage",
}
"""Remedies for names without a key of the same meaning in the same section."""


TASK_REMEDIES: Mapping[str, str] = {
    "grpo": "task: rl, with algorithm: grpo",
    "ppo": "task: rl, with algorithm: ppo",
    "rloo": "task: rl, with algorithm: rloo",
    "dpo": "task: preference",
    "ipo": "task: preference, with loss: ipo",
    "gkd": "task: distill, with loss: gkd",
    "train": "task: sft, or task: rl",
    "eval": "task: evaluate",
}
"""Remedies for kinds of training that other libraries name after their algorithm."""


def find_alias(name: str, valid: Collection[str]) -> str | None:
    """Return the key among `valid` that means the same as `name` in another library, or None."""
    return next((key for key in ALIASES.get(name, ()) if key in valid), None)
