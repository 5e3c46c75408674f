"""LoRA adapters of a server: each is listed as a model and answers like the engine."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fastapi import APIRouter
from fastapi.testclient import TestClient
from served import make_checkpoint

from perilune.engine.engine import Engine
from perilune.engine.request import Delta, Prompt, SamplingParams
from perilune.engine.runner import TorchRunner
from perilune.errors import RequestError
from perilune.models.adapters.files import Adapter
from perilune.models.adapters.lora import attach_adapter_pairs
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.serve.answers import CompletionAnswer, TokenFormatter
from perilune.serve.app import make_app, text_routes
from perilune.serve.guard import BodyLimits
from perilune.serve.server import _make_service
from perilune.serve.settings import Settings


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and an adapter for it."""
    root = tmp_path_factory.mktemp("adapters")
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(2, 96, generator=generator), torch.randn(128, 2, generator=generator)
    Adapter({"model.layers.0.self_attn.q_proj": pair}, 2.0).save(root / "poet")
    return make_checkpoint(root / "base"), root / "poet"


@pytest.fixture(scope="module")
def client(folders: tuple[Path, Path]) -> Iterator[TestClient]:
    checkpoint, poet = folders
    settings = Settings(checkpoint, name="base", slots=8, adapters=[f"poet={poet}"])
    service, _ = _make_service(settings, print)
    app = make_app(service, token=None, bodies=BodyLimits(1 << 20), routers=[text_routes(service)])
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def test_adapters_are_listed_as_models(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in listed] == [("base", None), ("poet", "base")]


def test_each_model_name_answers_with_its_own_weights(client: TestClient, folders: tuple[Path, Path]) -> None:
    decoder, tokenizer = load_checkpoint(folders[0])
    engine = Engine(decoder, slots=8, tokenizer=tokenizer)
    engine.add_adapter("poet", Adapter.load(folders[1]))
    prompt = tokenizer.encode("12+34=")
    answers = {}
    for name in ("base", "poet"):
        body = {"model": name, "prompt": prompt, "max_tokens": 12, "seed": 3, "logprobs": 0, "n": 2}
        answer = client.post("/v1/completions", json=body | {"return_token_ids": True}).json()
        assert answer["model"] == name
        answers[name] = [choice["token_ids"] for choice in answer["choices"]]
        for choice in answer["choices"]:
            scored = engine.score([prompt], [choice["token_ids"]], adapter=None if name == "base" else name)[
                0
            ].tolist()
            assert scored == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-6)
    assert answers["base"] != answers["poet"]
    params = SamplingParams(12, stop_token_ids=(tokenizer.eos_token_id,))
    direct = engine.sample([Prompt(prompt, (3, 0, 0))], 2, params)[0]
    assert answers["base"] == [sample.token_ids.tolist() for sample in direct]


def test_server_refuses_unknown_model_name(client: TestClient) -> None:
    refused = client.post("/v1/completions", json={"model": "bard", "prompt": "1", "max_tokens": 2})
    assert refused.status_code == 404
    assert "this server has 'base', 'poet'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("given", ["poet", "=folder", "poet="])
def test_settings_refuse_adapter_without_name_or_folder(given: str) -> None:
    with pytest.raises(RequestError, match="is not NAME=FOLDER"):
        Settings(Path(), adapters=[given])


def test_two_adapters_cannot_have_one_name() -> None:
    with pytest.raises(RequestError, match="two adapters are named 'poet'"):
        Settings(Path(), adapters=["poet=a", "poet=b"])


def test_adapter_cannot_take_the_name_of_the_model(folders: tuple[Path, Path]) -> None:
    with pytest.raises(RequestError, match="is the name of the model"):
        _make_service(Settings(folders[0], name="base", adapters=[f"base={folders[1]}"]), print)


def test_bfloat16_server_recognizes_the_base_of_an_adapter(tmp_path: Path) -> None:
    base, _ = load_checkpoint(make_checkpoint(tmp_path / "base"))
    pair = torch.ones(2, 96), torch.ones(128, 2)
    attach_adapter_pairs(base, {"model.layers.0.self_attn.q_proj": pair}, 2.0)
    Adapter.from_decoder(base).save(tmp_path / "poet")
    settings = Settings(tmp_path / "base", adapters=[f"poet={tmp_path / 'poet'}"], dtype="bfloat16")
    _make_service(settings, print)[0].close()
    with torch.no_grad():
        base.model.norm.weight[0] += 1
    Adapter.from_decoder(base).save(tmp_path / "poet")
    with pytest.raises(RequestError, match="trained on a base with checksum"):
        _make_service(settings, print)


def test_embedding_failure_or_route_crash_fails_only_that_request(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, routers = _make_service(Settings(folders[0], name="base", slots=8, embeddings="mean"), print)
    defect = APIRouter()
    defect.get("/defect")(lambda: 1 // 0)
    app = make_app(service, token=None, bodies=BodyLimits(1 << 20), routers=[*routers, defect])
    asked = {"model": "base", "input": "1+1="}
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for result, message in (
            (MemoryError(), "the embedding failed"),
            (torch.full((64, 96), torch.nan), "the model's hidden states are not finite"),
        ):
            with monkeypatch.context() as broken:
                broken.setattr(TorchRunner, "hidden_states", Mock(side_effect=[result]))
                failed = client.post("/v1/embeddings", json=asked)
            assert (failed.status_code, failed.json()["error"]["message"]) == (500, message)
            assert client.post("/v1/embeddings", json=asked).status_code == 200
        failed = client.get("/defect", headers={"X-Request-Id": "mine"})
        assert (failed.status_code, failed.headers["x-request-id"]) == (500, "mine")
        assert 'perilune_requests_total{path="/defect",status="500"} 1.0' in client.get("/metrics").text
        assert client.get("/health").status_code == 200


def test_aborted_answer_has_finish_reason_length() -> None:
    """OpenAI clients accept "length" but not "aborted"."""
    answer = CompletionAnswer("base", TokenFormatter(str, []), chat=True, logprobs=False, include_ids=False)
    gained = Delta(0, 0, [5], [-1.0], [0], "x", "aborted")
    assert b'"finish_reason":"length"' in answer.delta_event(0, gained)
