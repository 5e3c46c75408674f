"""A byte-level BPE tokenizer with ChatML control tokens, in which a text has many tokenizations."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from perilune.models.text.tokenizer import Tokenizer

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def chatml(template: str = CHATML, eos: str = "<|im_end|>", vocab_size: int = 300) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator(["the quick brown fox says hello to the user and the assistant"] * 4, trainer)
    return Tokenizer(backend, {"eos_token": eos, "pad_token": "<|endoftext|>", "chat_template": template})
