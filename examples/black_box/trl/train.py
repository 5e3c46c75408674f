"""Train with the GRPO of TRL, from one Hugging Face folder to another, without knowledge of Perilune.

    python train.py MODEL OUTPUTS --seed 0 --steps 60 --lr 6e-4

The tasks are sums of two three-digit numbers. An answer is right if the number after its last ";" is the sum
and it ended by itself. Writes OUTPUTS/model, OUTPUTS/log.jsonl and OUTPUTS/result.json.
"""

import argparse
import json
import random
from pathlib import Path

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, SAMPLES, MAX_TOKENS = 32, 8, 40


def is_right(prompt: str, answer: str) -> bool:
    first, second = prompt.rstrip("=").split("+")
    return answer.rpartition(";")[2] == str(int(first) + int(second))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("outputs", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=6e-4)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    draws = random.Random(args.seed)
    numbers = [(draws.randrange(100, 1000), draws.randrange(100, 1000)) for _ in range(PROMPTS * args.steps)]
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")

    def reward(prompts, completions, completion_ids, **_):
        return [
            float(ids[-1] == tokenizer.eos_token_id and is_right(prompt, text))
            for prompt, text, ids in zip(prompts, completions, completion_ids, strict=True)
        ]

    config = trl.GRPOConfig(
        output_dir=str(args.outputs / "trainer"),
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=10,
        seed=args.seed,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        beta=0.0,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in numbers]}),
        processing_class=tokenizer,
    )
    trainer.train()

    model = args.outputs / "model"
    trainer.model.save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = [row for row in trainer.state.log_history if "reward" in row]
    with (args.outputs / "log.jsonl").open("w") as file:
        for row in rows:
            file.write(
                json.dumps({"step": row["step"], "reward": row["reward"], "entropy": row.get("entropy")})
                + "\n"
            )
    result = {"last_reward": rows[-1]["reward"], "trl": trl.__version__}
    (args.outputs / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
