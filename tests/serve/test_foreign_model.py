"""The server runs models outside the decoder through transformers, and warns that they are slower."""

from pathlib import Path

import pytest
import torch
from served import served

from perilune.models.text.tokenizer import Tokenizer
from perilune.models.transformers_model import load_transformers_model

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def test_server_answers_with_transformers_model(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=98, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        initializer_range=0.3, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    tokenizer = Tokenizer.characters()
    tokenizer.save(tmp_path / "neox")
    module = load_transformers_model(tmp_path / "neox").module
    prompt = torch.tensor([tokenizer.encode("12+34=")])
    expected = module.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[
        0, prompt.shape[1] :
    ]
    with served(tmp_path / "neox", "--slots", "4") as server:
        assert any("gpt_neox" in line and "several times slower" in line for line in server.said)
        with server.client() as client:
            answer = client.completions.create(model="neox", prompt="12+34=", max_tokens=8, temperature=0)
    assert answer.choices[0].text == tokenizer.decode(expected.tolist())
