"""Weight updates of a running server: transfers, refusals and interruptions."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Direct, Served, make_checkpoint, served

from perilune import servers
from perilune.cli.main import main
from perilune.errors import RequestError, WorkFailedError
from perilune.models.checkpoints.loading import load_checkpoint, save_checkpoint
from perilune.weights import push
from perilune.weights.push import PeriluneServer, VLLMServer, WeightServer, find_server

TOKEN = "a-token-for-these-tests"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def modified_checkpoint(checkpoint: Path, folder: Path, seed: int, values: int | None = None) -> Path:
    """Save a copy of a checkpoint with new values in every tensor: all of them, or the first `values`."""
    decoder, tokenizer = load_checkpoint(checkpoint)
    other, _ = load_checkpoint(checkpoint)
    other.initialize(seed)
    for parameter, another in zip(decoder.parameters(), other.parameters(), strict=True):
        parameter.data.view(-1)[:values] = another.data.view(-1)[:values]
    save_checkpoint(folder, decoder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    options = ("--weight-updates", "--control", "--max-body", "0.1", "--token-env", "SERVER_TOKEN")
    with served(checkpoint, *options, token=TOKEN, SERVER_TOKEN=TOKEN) as server:
        yield server


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["push", *arguments, "--token-env", "SERVER_TOKEN"])
    assert ended.value.code == 0


def answer(server: Served) -> str:
    made = server.client().completions.create(
        model="tiny", prompt="1+1=", max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    return made.choices[0].text


def expected(folder: Path) -> str:
    direct = Direct.load(folder)
    return direct.text(direct.sample("1+1=", 0, max_tokens=24, temperature=0, stop_token_ids=())[0])


class Flaky(httpx.HTTPTransport):
    """Drops every third upload, the response to one in three others, and the first one to an update."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = self.updates = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            self.count += 1
            if self.count % 3 == 0:
                raise httpx.WriteError("lost")
            self.bytes += len(request.content)
            if self.count % 3 == 1:
                super().handle_request(request).read()
                raise httpx.ReadError("lost")
        if request.method == "POST":
            self.updates += 1
            if self.updates == 1:
                super().handle_request(request).read()
                raise httpx.ReadError("lost")
        return super().handle_request(request)


def test_push_replaces_weights(
    server: Served, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SERVER_TOKEN", TOKEN)
    second = modified_checkpoint(checkpoint, tmp_path / "second", 7)
    third = modified_checkpoint(second, tmp_path / "third", 8, values=1)
    assert len({expected(folder) for folder in (checkpoint, second)}) == 2
    run(str(second), server.url)
    assert "version 1" in capsys.readouterr().out
    assert answer(server) == expected(second)
    run(str(third), server.url, "--base", str(second), "--json")
    assert '"version": 2' in (out := capsys.readouterr().out)
    assert int(out.split('"bytes": ')[1].split(",")[0]) < 20_000
    assert answer(server) == expected(third)
    # A wrong base costs a full transfer.
    pushed = find_server(server.url, TOKEN).push(checkpoint, second, lambda sent, total: None)
    assert pushed.version == 3 and pushed.bytes > 1_000_000
    assert answer(server) == expected(checkpoint)


def test_push_resumes_interrupted_transfer(
    server: Served, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    flaky = Flaky()
    remote = find_server(server.url, TOKEN)
    assert isinstance(remote, PeriluneServer)
    monkeypatch.setattr(
        remote._http._client,
        "_client",
        httpx.Client(transport=flaky, base_url=server.root, headers=remote._http._client._client.headers),
    )
    second = modified_checkpoint(checkpoint, tmp_path / "second", 9)
    pushed = remote.push(second, None, lambda sent, total: None)
    assert flaky.count > 10 and flaky.updates == 2
    assert flaky.bytes == pushed.bytes  # no byte was sent again
    assert answer(server) == expected(second)


def test_push_reports_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(WorkFailedError, match="does not answer"):
        find_server("http://127.0.0.1:9", None)
    assert len(waits) == 5  # no wait after the last of six attempts


def test_push_does_not_repeat_an_upload_after_an_error_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = []

    def respond(request: httpx.Request) -> httpx.Response:
        methods.append(request.method)
        if request.method == "PUT":
            return httpx.Response(500, json={"error": {"message": "no space left on device"}})
        return httpx.Response(200, json={"data": [{"owned_by": "perilune"}], "received": 0})

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **of: client(transport=httpx.MockTransport(respond), **of))
    remote = find_server("http://perilune:8000", None)
    assert isinstance(remote, PeriluneServer)
    (tmp_path / "update").write_bytes(b"12345")
    with pytest.raises(WorkFailedError, match="no space left on device") as failure:
        remote.send(tmp_path / "update", 2)
    assert methods == ["GET", "GET", "PUT"] and str(failure.value).count("try:") == 1


def test_answer_that_is_too_large_fails_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_MAX_ANSWER_BYTES", 10)
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, json={"data": [{"owned_by": "vllm"}]})
    )
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **of: client(transport=transport, **of))
    with pytest.raises(WorkFailedError, match="an answer is larger than"):
        find_server("http://perilune:8000", None)


def test_push_of_an_incomplete_file_advises_to_repeat_the_command(server: Served) -> None:
    remote = find_server(server.url, TOKEN)
    assert isinstance(remote, PeriluneServer)
    with pytest.raises(RequestError) as refused:
        remote._http.json("POST", "/v1/weights", {"file": "0" * 64})
    assert refused.value.remedy == "run the same command again"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://[::1", "http://host:port", "http://user:password@127.0.0.1:9"]
)
def test_push_refuses_malformed_url_without_a_request(url: str) -> None:
    with pytest.raises(RequestError, match=r"is not the URL of a server|contains a password"):
        find_server(url, None)


def test_server_refuses_malformed_weight_uploads(server: Served, tmp_path: Path) -> None:
    before = answer(server)
    data = b"no weights at all"
    name = hashlib.sha256(data).hexdigest()

    def put(path: str, place: str, content: bytes) -> int:
        with server.http() as http:
            headers = {"Content-Range": place} if place else {}
            return http.put(f"/v1/weights/{path}", content=content, headers=headers).status_code

    def use(digest: str) -> httpx.Response:
        with server.http() as http:
            return http.post("/v1/weights", json={"file": digest})

    assert put(name, "", data) == put(name, "bytes 0-3/17", data) == put(name, "bytes 0-16/16", data) == 400
    assert put("../../etc/passwd", "bytes 0-16/17", data) == put("A" * 64, "bytes 0-16/17", data) == 404
    assert put(name, "bytes 0-16/999999999999", data) == 413
    assert put(name, "bytes 5-21/22", data) == 409
    assert put("0" * 64, "bytes 0-16/17", data) == 422
    assert use(name).status_code == 404
    assert put(name, "bytes 0-9/17", data[:10]) == 200
    assert use(name).status_code == 404  # bytes are missing
    assert use("../x").status_code == 400
    assert put("1" * 64, "bytes 0-16/18", data) == 200  # replaces the previous upload
    assert put(name, "bytes 0-16/17", data) == 200
    assert "not a weight update" in use(name).json()["error"]["message"]
    with server.http() as http:
        assert (
            http.put(f"/v1/weights/{name}", content=data, headers={"Authorization": "no"}).status_code == 401
        )
    assert answer(server) == before


def test_push_refuses_model_of_another_shape(server: Served, tmp_path: Path) -> None:
    from perilune.models.checkpoints.loading import load_model

    save_checkpoint(tmp_path / "other", *load_model("small"))
    with pytest.raises(RequestError, match="has no tensor"):
        find_server(server.url, TOKEN).push(tmp_path / "other", None, lambda sent, total: None)


def test_vllm_client_updates_perilune_server(server: Served, checkpoint: Path, tmp_path: Path) -> None:
    """The client pauses the server, loads a local folder and resumes the server."""
    vllm = VLLMServer(push._Http(server.url, TOKEN))
    folder = modified_checkpoint(checkpoint, tmp_path / "driven", 11)
    before = find_server(server.url, TOKEN)
    assert isinstance(before, PeriluneServer)
    vllm.push(folder, None, lambda sent, total: None)
    assert answer(server) == expected(folder)
    again = modified_checkpoint(
        checkpoint, tmp_path / "pushed", 12, 4
    )  # a delta after it finds the right base
    report = find_server(server.url, TOKEN).push(again, folder, lambda sent, total: None)
    assert report.changed < 1
    assert answer(server) == expected(again)
    with server.http() as http:
        for body, message in (
            ({"method": "eval", "kwargs": {}}, "method"),
            ({"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}, "no file"),
        ):
            refused = http.post("/collective_rpc", json=body)
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"], refused.text
    assert answer(server) == expected(again)


def test_server_says_that_it_receives_no_weights_from_gpu_to_gpu(server: Served) -> None:
    """The calls of vLLM's client of weight transfers, in its order."""
    calls = {
        "/init_weight_transfer_engine": {"init_info": {"master_address": "127.0.0.1", "master_port": 1}},
        "/start_weight_update": None,
        "/update_weights": {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}},
        "/finish_weight_update": None,
    }
    with server.http() as http:
        refusals = [http.get("/get_world_size"), *(http.post(path, json=calls[path]) for path in calls)]
    for refused in refusals:
        assert refused.status_code == 501
        assert "reload_weights of POST /collective_rpc" in refused.json()["error"]["message"]


class VLLM(httpx.MockTransport):
    """A fake vLLM server, with the routes of its development mode, such as /pause and /collective_rpc."""

    def __init__(self, fails: bool = False, config: Any = None, lost: str = "") -> None:
        super().__init__(self._answer)
        self.paused, self.fails, self.config, self.lost = False, fails, config, lost
        self.calls: list[Any] = []

    def _answer(self, request: httpx.Request) -> httpx.Response:
        import json

        path = request.url.path
        body = json.loads(request.content) if request.content else None
        self.calls.append((request.url.raw_path.decode(), body))
        if path == self.lost:
            raise httpx.ReadError("reset by peer")
        if path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]})
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return httpx.Response(200, json={"status": "paused" if self.paused else "resumed"})
        if path == "/sleep":
            self.paused = True
        if path in ("/sleep", "/wake_up"):
            return httpx.Response(200, json={"status": "sleeping"})
        if path == "/collective_rpc":
            assert self.paused
            if self.fails:
                return httpx.Response(500, text="Internal Server Error")
            return httpx.Response(200, json={"results": [None]})
        if path == "/server_info" and self.config is not None:
            return httpx.Response(200, json={"vllm_config": self.config})
        if path in ("/reset_prefix_cache", "/v1/load_lora_adapter"):
            return httpx.Response(200, text="Success" if "adapter" in path else "")
        return httpx.Response(404, json={"detail": "Not Found"})


def vllm(monkeypatch: pytest.MonkeyPatch, fake: VLLM) -> VLLMServer:
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(transport=fake, **options))
    server = find_server("http://vllm:8000/v1", None)
    assert isinstance(server, VLLMServer)
    return server


def test_vllm_push_loads_folder_while_paused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = VLLM()
    vllm(monkeypatch, fake).push(checkpoint, None, lambda sent, total: None)
    load = {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(checkpoint), "is_checkpoint_format": True},
    }
    assert fake.calls[2:] == [
        ("/pause?mode=keep", {}),
        ("/collective_rpc", load),
        ("/reset_prefix_cache", {}),
        ("/resume", {}),
    ]


def test_vllm_loads_weights_between_sleep_and_waking(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = VLLM()
    server = vllm(monkeypatch, fake)
    server.sleep()
    server.wake_up("weights")
    server.push(checkpoint, None, lambda sent, total: None)
    server.wake_up("kv_cache")
    # Without /resume: vLLM must not compute before its cache is back.
    paths = ["/sleep?level=1", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]
    assert [
        path for path, _ in fake.calls if "/v1/models" not in path and "/server_info" not in path
    ] == paths
    server.push(checkpoint, None, lambda sent, total: None)
    assert fake.calls[-1] == ("/resume", {})


def test_vllm_stays_paused_after_failed_load(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = VLLM(fails=True)
    with pytest.raises(WorkFailedError, match="stays paused"):
        vllm(monkeypatch, fake).push(checkpoint, None, lambda sent, total: None)
    assert fake.paused


@pytest.mark.parametrize("lost", ["/pause", "/reset_prefix_cache", "/resume", "/v1/load_lora_adapter"])
def test_lost_connection_to_vllm_is_reported_and_not_repeated(
    lost: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    fake = VLLM(lost=lost)
    server = vllm(monkeypatch, fake)
    with pytest.raises(WorkFailedError, match=rf"POST {lost}.*does not answer") as failure:
        server.push(tmp_path if "lora" in lost else checkpoint, None, lambda sent, total: None)
    assert "http://vllm:8000" in str(failure.value) and "push again" in str(failure.value)
    assert [path.partition("?")[0] for path, _ in fake.calls].count(lost) == 1


class SGLang(httpx.MockTransport):
    """A fake SGLang server with the endpoints that replace weights."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(self._answer)
        self.fails, self.calls = fails, list[Any]()

    def _answer(self, request: httpx.Request) -> httpx.Response:
        import json

        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "sglang"}]})
        self.calls.append((path, json.loads(request.content)))
        if path == "/update_weights_from_disk" and self.fails:
            return httpx.Response(400, json={"success": False, "message": "Failed to load weights"})
        return httpx.Response(200, json={"success": True})


def sglang(monkeypatch: pytest.MonkeyPatch, fake: SGLang) -> WeightServer:
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(transport=fake, **options))
    return find_server("http://sglang:30000", None)


def test_sglang_loads_folder_while_paused_or_asleep(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SGLang()
    server = sglang(monkeypatch, fake)
    load = ("/update_weights_from_disk", {"model_path": str(checkpoint), "flush_cache": True})
    server.push(checkpoint, None, lambda sent, total: None)
    assert fake.calls == [("/pause_generation", {"mode": "retract"}), load, ("/continue_generation", {})]
    fake.calls.clear()
    server.sleep()
    server.wake_up("weights")
    server.push(checkpoint, None, lambda sent, total: None)
    server.wake_up("kv_cache")
    assert fake.calls == [
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        load,
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ]


def test_sglang_stays_paused_after_failed_load(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SGLang(fails=True)
    server = sglang(monkeypatch, fake)
    with pytest.raises(WorkFailedError, match=r"stays paused.*Failed to load weights"):
        server.push(checkpoint, None, lambda sent, total: None)
    assert fake.calls[-1][0] == "/update_weights_from_disk"
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RequestError, match="adapter"):
        server.push(tmp_path, None, lambda sent, total: None)


def test_vllm_on_a_cpu_gets_no_model_with_tied_embeddings(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = VLLM(config={"device_config": {"device": "cpu"}})  # a part of the answer of vLLM 0.32
    with monkeypatch.context() as patched, pytest.raises(RequestError, match="old output weights"):
        vllm(patched, fake).push(checkpoint, None, lambda sent, total: None)
    assert "/pause?mode=keep" not in [path for path, _ in fake.calls]
    for config in ({"device_config": {"device": "cuda"}}, "model='m', device_config=cpu"):
        with monkeypatch.context() as patched:
            vllm(patched, VLLM(config=config)).push(checkpoint, None, lambda sent, total: None)


def test_vllm_push_replaces_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "adapter_config.json").write_text("{}")
    fake = VLLM()
    vllm(monkeypatch, fake).push(tmp_path / "math", None, lambda sent, total: None)
    adapter = {"lora_name": "math", "lora_path": str(tmp_path / "math"), "load_inplace": True}
    assert fake.calls[1:] == [("/v1/load_lora_adapter", adapter)]
