"""The engine thread: streams, aborts, slow readers and engine failures."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from served import CONTEXT
from tokenizers import decoders

from perilune.engine.engine import Engine
from perilune.engine.request import Delta, Prompt, Request, SamplingParams
from perilune.engine.select_runner import fastest_runner
from perilune.engine.step import StepBatch
from perilune.errors import RequestError, WorkFailedError
from perilune.models.checkpoints.loading import save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.serve.engine_thread import EngineThread, Stream
from perilune.serve.exchange import Exchange
from perilune.serve.metrics import Metrics
from perilune.serve.schema import ChatBody, CompletionBody
from perilune.serve.server import _make_service
from perilune.serve.settings import Settings


def make_decoder(**changes: Any) -> Decoder:
    shape = {"initializer_range": 0.15, "max_position_embeddings": CONTEXT}
    decoder = Decoder(PRESETS["tiny"].replace(**shape, **changes))
    decoder.initialize(0)
    return decoder


DECODER = make_decoder()


def ask(tokens: int, seed: int = 0, n: int = 1, prompt: tuple[int, ...] = (5, 6, 7)) -> Request:
    return Request(list(prompt), SamplingParams(max_tokens=tokens), (seed, 0, 0), n)


async def read(stream: Stream) -> dict[int, Delta]:
    """Read a stream to its end; returns one merged delta for each choice."""
    whole: dict[int, Delta] = {}
    while news := await stream.next_deltas():
        for choice, delta in news:
            if choice in whole:
                whole[choice].extend(delta)
            else:
                whole[choice] = delta
    return whole


def run_beside_engine(engine: Engine, work: Callable[[EngineThread], Awaitable[None]]) -> EngineThread:
    """Run `work` in an event loop while the engine thread runs."""
    thread = EngineThread(engine)

    async def main() -> None:
        thread.start()
        try:
            async with asyncio.timeout(60):
                await work(thread)
        finally:
            thread.stop()

    asyncio.run(main())
    return thread


def test_service_samples_tokenizer_tokens_only_and_marks_continued_texts(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m", make_decoder(vocab_size=110), Tokenizer.characters())
    service, _ = _make_service(Settings(tmp_path / "m", name="m"), print)
    engine: Any = service.thread._engine
    (group,) = engine.sample([Prompt([5], (0, 0, 0))], 20, SamplingParams(20, temperature=30.0))
    assert max(sample.token_ids.max() for sample in group) == 97

    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "1"}]}
    opened = {"add_generation_prompt": False, "continue_final_message": True}
    bodies = [CompletionBody(model="m", prompt="1"), ChatBody(**chat), ChatBody(**chat, **opened)]
    asked = [service._requests(body, [[5]], None)[0] for body in bodies]
    assert [request.continues_text for request in asked] == [True, False, True]
    service.close()


def test_all_prompts_count_as_samples_while_they_are_encoded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m", make_decoder(), Tokenizer.characters())
    service, _ = _make_service(Settings(tmp_path / "m", name="m"), print)
    body = CompletionBody(model="m", prompt=["1", "2", "3"], n=2)
    entering = []

    async def encode() -> list[list[int]]:
        entering.append(service.entering)
        raise RequestError("no prompt")

    answer = service._make_answer(body, chat=False, logprobs=False)
    with pytest.raises(RequestError, match="no prompt"):
        asyncio.run(service._begin(body, answer, encode))
    assert (entering, service.entering) == ([6], 0)
    service.close()


def test_echoed_prompts_are_scored_a_few_at_a_time(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m", make_decoder(), Tokenizer.characters())
    service, _ = _make_service(Settings(tmp_path / "m", name="m"), print)
    pieces = [len(piece) for piece in service._prompt_logprobs([[5] * 200] * 5)]  # of 512 tokens at most
    assert pieces == [2, 2, 1]
    service.close()


@pytest.mark.parametrize("stream", [False, True])
def test_continued_text_keeps_leading_space(stream: bool) -> None:
    backend = copy.deepcopy(Tokenizer.characters()._backend)
    steps = [decoders.Replace("e", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend, {"eos_token": "<eos>"})
    engine = Engine(DECODER, slots=2, cache_tokens=512, tokenizer=tokenizer)
    likely = {tokenizer.encode("e")[0]: 100.0}
    for continues, text in ((False, " " * 3), (True, " " * 4)):
        params = SamplingParams(4, logit_bias=likely)
        engine.add(Request([5], params, continues_text=continues), stream=stream)
        streamed = ""
        while engine.unfinished:
            streamed += "".join(delta.text for delta in engine.step())
        assert streamed == text


def test_usage_counts_cached_tokens_of_all_prompts() -> None:
    engine = Engine(DECODER, slots=4, cache_tokens=1024)
    first, second = (5, *range(10, 42)), (6, *range(10, 58))
    engine.sample([Prompt(list(ids), (0, 0, 0)) for ids in (first, second)], 1, SamplingParams(1))

    async def ask_again(thread: EngineThread) -> None:
        stream = await thread.submit([ask(2, n=2, prompt=ids) for ids in (first, second)], per_token=False)
        answer: Any = None
        exchange = Exchange(stream, answer, Metrics(), 0.0)
        assert len(await exchange._collect()) == 4
        assert (exchange.usage.cached, exchange.usage.prompt) == (32 + 48, 33 + 49)

    run_beside_engine(engine, ask_again)


def expected(request: Request) -> list[tuple[list[int], list[float]]]:
    group = Engine(DECODER).sample([Prompt(request.token_ids, request.key)], request.n, request.params)[0]
    return [(sample.token_ids.tolist(), sample.logprobs.tolist()) for sample in group]


@pytest.mark.parametrize("per_token", [True, False])
def test_choice_numbers_continue_across_requests(per_token: bool) -> None:
    requests = [ask(20, seed=1, n=2), ask(9, seed=2, n=3)]

    async def work(thread: EngineThread) -> None:
        whole = await read(await thread.submit(requests, per_token=per_token))
        sampled = [(whole[choice].token_ids, whole[choice].logprobs) for choice in sorted(whole)]
        assert sampled == expected(requests[0]) + expected(requests[1])
        assert {whole[choice].finish_reason for choice in whole} == {"length"}
        assert thread.num_open_samples == 0

    run_beside_engine(Engine(DECODER), work)


def test_slow_reader_blocks_no_other_request_and_receives_one_delta() -> None:
    async def work(thread: EngineThread) -> None:
        asleep = await thread.submit([ask(200, seed=3)], per_token=True)
        for seed in range(5):
            await read(await thread.submit([ask(30, seed)], per_token=True))
        while asleep.remaining:
            await asyncio.sleep(0.01)
        ((choice, delta),) = await asleep.next_deltas()  # one delta with every token
        assert (choice, len(delta.token_ids), delta.finish_reason) == (0, 200, "length")
        assert [(delta.token_ids, delta.logprobs)] == expected(asleep.requests[0])
        assert await asleep.next_deltas() == []

    run_beside_engine(Engine(DECODER), work)


def test_aborted_requests_free_their_cache_blocks() -> None:
    engine = Engine(DECODER, slots=4)

    async def work(thread: EngineThread) -> None:
        streams = [await thread.submit([ask(CONTEXT - 3, seed)], per_token=True) for seed in range(12)]
        for stream in streams[:4]:
            await stream.next_deltas()
        assert thread.num_open_samples == 12
        for stream in streams:  # some running, some waiting
            stream.abort()
        with pytest.raises(WorkFailedError, match="aborted"):
            while await streams[0].next_deltas():
                pass
        impatient = asyncio.create_task(thread.submit([ask(CONTEXT - 3)], per_token=True))
        await asyncio.sleep(0)
        impatient.cancel()  # before the engine accepts it
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert thread.num_open_samples == 0
        assert (await read(await thread.submit([ask(2)], per_token=True)))[0].finish_reason == "length"
        for _ in range(200):
            if not engine.unfinished:
                break
            await asyncio.sleep(0.01)

    run_beside_engine(engine, work)
    assert not engine.unfinished
    assert engine.cache_use == 0
    assert engine.counters.steps < CONTEXT - 3  # no request was sampled to its end


def test_submit_with_one_invalid_request_accepts_none() -> None:
    engine = Engine(DECODER)

    async def work(thread: EngineThread) -> None:
        with pytest.raises(RequestError, match="outside"):
            await thread.submit([ask(50), ask(50, prompt=(98,))], per_token=True)
        assert thread.num_open_samples == 0
        assert len((await read(await thread.submit([ask(3)], per_token=True)))[0].token_ids) == 3

    run_beside_engine(engine, work)
    assert not engine.unfinished
    assert engine.cache_use == 0


class Faulty:
    """A runner whose next `failures` steps raise MemoryError."""

    def __init__(self, decoder: Any, num_blocks: Sequence[int]) -> None:
        self._inner = fastest_runner(decoder, num_blocks)
        self.failures = 0

    def run(self, batch: StepBatch) -> torch.Tensor:
        if self.failures:
            self.failures -= 1
            raise MemoryError
        return self._inner.run(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def faulty() -> tuple[Engine, Faulty]:
    made: list[Faulty] = []

    def runner(decoder: Any, num_blocks: Sequence[int]) -> Faulty:
        made.append(Faulty(decoder, num_blocks))
        return made[0]

    return Engine(DECODER, runner=runner), made[0]


def test_failed_step_fails_running_requests_and_spares_later_ones(faulty: tuple[Engine, Faulty]) -> None:
    engine, runner = faulty
    restarts: list[None] = []

    async def work(thread: EngineThread) -> None:
        thread.on_restart = lambda: restarts.append(None)
        streams = [await thread.submit([ask(200, seed)], per_token=True) for seed in range(3)]
        await streams[0].next_deltas()
        runner.failures = 1
        for stream in streams:
            with pytest.raises(WorkFailedError, match="the engine failed"):
                await read(stream)
        assert thread.num_open_samples == 0
        again = ask(20, seed=5, n=2)
        whole = await read(await thread.submit([again], per_token=True))
        assert [(whole[choice].token_ids, whole[choice].logprobs) for choice in (0, 1)] == expected(again)

    assert run_beside_engine(engine, work).failure is None
    assert len(restarts) == 1


def test_permanent_engine_failure_reaches_callback_and_all_requests(faulty: tuple[Engine, Faulty]) -> None:
    engine, runner = faulty
    runner.failures = 2  # the restart fails too
    failures: list[BaseException] = []

    async def work(thread: EngineThread) -> None:
        thread.on_failure = failures.append
        with pytest.raises(WorkFailedError, match="the engine failed"):
            await read(await thread.submit([ask(5)], per_token=True))
        while not failures:
            await asyncio.sleep(0.01)
        with pytest.raises(WorkFailedError, match="has failed"):
            await thread.submit([ask(5)], per_token=True)
        assert thread.num_open_samples == 0

    thread = run_beside_engine(engine, work)
    assert failures == [thread.failure]
    assert isinstance(thread.failure, MemoryError)


def test_nan_weights_fail_each_request() -> None:
    decoder = make_decoder()
    with torch.no_grad():
        decoder.model.norm.weight.fill_(float("nan"))

    async def work(thread: EngineThread) -> None:
        for per_token in (True, False):
            stream = await thread.submit([ask(5), ask(9, n=2)], per_token=per_token)
            with pytest.raises(WorkFailedError, match="not finite"):
                await read(stream)
        assert thread.num_open_samples == 0

    assert run_beside_engine(Engine(decoder), work).failure is None


def test_failed_weight_load_stops_the_engine_and_refused_one_does_not() -> None:
    """A refused load changes nothing. After any other error, no token of mixed weights leaves the engine."""

    def refuse() -> None:
        raise RequestError("another model")

    def fail() -> None:
        raise MemoryError

    ended: list[BaseException] = []

    async def work(thread: EngineThread) -> None:
        thread.on_failure = ended.append
        stream = await thread.submit([ask(CONTEXT - 3)], per_token=True)
        with pytest.raises(RequestError, match="another model"):
            await thread.run_between_steps(refuse)
        assert await stream.next_deltas()
        with pytest.raises(WorkFailedError):
            await thread.run_between_steps(fail)
        with pytest.raises(WorkFailedError):
            while True:
                assert await stream.next_deltas()
        with pytest.raises(WorkFailedError):
            await thread.run_between_steps(refuse)

    run_beside_engine(Engine(DECODER), work)
    assert isinstance(ended[0], MemoryError)
