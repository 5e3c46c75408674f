"""Answers requests: encodes prompts, submits them to the engine, and returns the responses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from perilune.engine.request import Delta, SamplingParams
from perilune.engine.request import Request as EngineRequest
from perilune.engine.scoring import PromptLogprobs
from perilune.errors import RequestError
from perilune.serve.answers import CompletionAnswer, TokenFormatter, Usage
from perilune.serve.bodies import read_request
from perilune.serve.channels import ChannelsReader
from perilune.serve.engine_thread import EngineThread, Stream
from perilune.serve.errors import ApiError, unknown_model_error
from perilune.serve.exchange import AnswerBuilder, Exchange
from perilune.serve.gate import Gate
from perilune.serve.grammars import AnswerConstraints
from perilune.serve.metrics import Metrics
from perilune.serve.model import ServedModel
from perilune.serve.model_service import ModelService
from perilune.serve.parts import THINK_END, THINK_START, Beginning, PartsReader, Reader
from perilune.serve.prompts import Conversation, Prompts
from perilune.serve.responses import run_while_connected
from perilune.serve.schema import (
    MAX_CHOICES,
    AnswerBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    TokenizeBody,
)

if TYPE_CHECKING:
    from perilune.engine.constraints import Constraint


class Service(ModelService):
    """Answers requests with one engine.

    Args:
        thread, max_samples: as for `ModelService`.
        prompt_logprobs: the engine's method; only the engine's thread calls it.
        gauges: returns the engine's values for /metrics; called from the event loop.
    """

    def __init__(
        self,
        model: ServedModel,
        thread: EngineThread,
        prompt_logprobs: Callable[..., Iterator[list[PromptLogprobs]]],
        max_samples: int,
        gauges: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        super().__init__(thread, Metrics(), max_samples)
        self.model, self._prompt_logprobs, self._gauges = model, prompt_logprobs, gauges
        self.gate = Gate()
        self.prompts = Prompts(model, self.lanes)
        self._constraints = AnswerConstraints(model)
        self.token_formatter = TokenFormatter(model.tokenizer.token_text, _token_bytes(model))

    def abort_all(self, reason: str) -> None:
        self.gate.refuse_all(reason)
        super().abort_all(reason)
        self.prompts.stop(reason)

    def gauges(self) -> Mapping[str, float]:
        return {**self._gauges(), **super().gauges()}

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        body, size = await read_request(request, ChatBody, self.lanes)
        answer = self._make_answer(body, chat=True, logprobs=body.logprobs)
        return await self.converse(body, answer, size, request)

    async def converse(self, body: ChatBody, answer: AnswerBuilder, size: int, request: Request) -> Response:
        """Sample the answer of a chat from a body of `size` bytes, and respond."""
        conversation = Conversation(
            body.messages, body.usable_tools, body.variables, body.continue_final_message
        )

        async def encode() -> list[list[int]]:
            return [await self.prompts.encode_conversation(conversation, size)]

        return await self._complete(body, answer, encode, request)

    async def tokenize(self, request: Request) -> Response:
        """Answer POST /tokenize."""
        body, size = await read_request(request, TokenizeBody, self.lanes)
        if body.messages is not None:
            tools = [tool.document for tool in body.tools]
            conversation = Conversation(body.messages, tools, body.variables, body.continue_final_message)
            tokens = await self.prompts.encode_conversation(conversation, size)
        else:
            prompt = body.prompt or ""
            self.prompts.check_length(len(prompt), "prompt")
            tokenizer = self.model.tokenizer
            starts = body.add_special_tokens is not False
            encode = partial(tokenizer.encode_text_prompt if starts else tokenizer.encode, prompt)
            tokens = await self.lanes.short_or_long(size, encode)
        return JSONResponse({"count": len(tokens), "max_model_len": self.model.context, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """Answer POST /detokenize."""
        body, size = await read_request(request, DetokenizeBody, self.lanes)
        outside = next((token for token in body.tokens if token >= self.model.tokenizer.vocab_size), None)
        if outside is not None:
            raise ApiError(400, f"the vocabulary has no token {outside}", param="tokens")
        decode = partial(self.model.tokenizer.decode, body.tokens, special=True)
        return JSONResponse({"prompt": await self.lanes.short_or_long(size, decode)})

    async def complete(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        body, size = await read_request(request, CompletionBody, self.lanes)
        if body.num_choices > MAX_CHOICES:
            raise ApiError(400, f"a request may have at most {MAX_CHOICES} choices", param="n")

        answer = self._make_answer(body, chat=False, logprobs=body.logprobs is not None)

        async def encode() -> list[list[int]]:
            prompts = await self.prompts.encode_texts(body.prompts, size, body.max_tokens)
            if body.echo:
                answer.echoed = await self._echo_prompts(body, prompts)
            return prompts

        if not body.max_tokens:
            return await self._return_prompts(body, answer, encode, request)
        return await self._complete(body, answer, encode, request)

    async def _return_prompts(
        self,
        body: CompletionBody,
        answer: CompletionAnswer,
        encode: Callable[[], Coroutine[Any, Any, list[list[int]]]],
        request: Request,
    ) -> Response:
        """Answer a completion request that only echoes its prompts (max_tokens 0), with their log-probs."""
        began = perf_counter()
        self.find_adapter(body.model)
        with self.admit():
            prompts = await run_while_connected(encode(), request.receive)
        usage = Usage(sum(map(len, prompts)))
        request.state.model, request.state.usage = body.model, usage
        self.metrics.record_finished(began, prompt=usage.prompt, completion=0, cached=0)
        empty = [Delta(0, 0, [], [], [], finish_reason="length")] * body.num_choices
        return await asyncio.to_thread(lambda: JSONResponse(answer.build_response(empty, prompts, usage)))

    async def _echo_prompts(self, body: CompletionBody, prompts: Sequence[list[int]]) -> list[Delta]:
        """Return the prompts to put before the choices. The first token of each prompt has log-prob 0."""
        texts = [
            prompt if isinstance(prompt, str) else self.model.tokenizer.decode(tokens)
            for prompt, tokens in zip(body.prompts, prompts, strict=True)
        ]
        if body.logprobs is None:
            return [Delta(0, 0, [], [], [], text) for text in texts]
        echoed = []
        scored = await self._score(prompts, body.logprobs, self.find_adapter(body.model))
        for text, tokens, (logprobs, likely) in zip(texts, prompts, scored, strict=True):
            top = [[], *likely] if body.logprobs else None
            echoed.append(Delta(0, 0, tokens, [0.0, *logprobs.tolist()], [], text, top_logprobs=top))
        return echoed

    async def _score(self, texts: Sequence[list[int]], top: int, adapter: str | None) -> list[PromptLogprobs]:
        """Return the log-probs of texts. The engine scores a bounded number of tokens between two steps."""
        logprobs: list[PromptLogprobs] = []
        pieces = self._prompt_logprobs(texts, top, adapter)
        while len(logprobs) < len(texts):
            await self.gate.enter()
            await self.thread.run_between_steps(lambda: logprobs.extend(next(pieces)))
        return logprobs

    def _make_answer(self, body: AnswerBody, *, chat: bool, logprobs: bool) -> CompletionAnswer:
        answer = CompletionAnswer(
            body.model,
            self.token_formatter,
            chat=chat,
            logprobs=logprobs,
            include_ids=body.return_token_ids,
            parts=self.make_reader_factory(body) if isinstance(body, ChatBody) else None,
            new_id=self.make_id_factory(body.messages if isinstance(body, ChatBody) else ()),
        )
        answer.include_usage = body.stream_options is not None and body.stream_options.include_usage
        answer.names_function = isinstance(body, ChatBody) and body.names_function
        return answer

    def make_reader_factory(self, body: ChatBody) -> Callable[..., Reader] | None:
        """Return a function that creates the reader of a chat's answer; None if all text is content."""
        schemas = {tool.function.name: tool.function.parameters for tool in body.tools}
        calls = self.model.tool_format.with_schemas(schemas) if body.usable_tools else None
        channels = self.model.tool_format.channels
        if calls is None and not self.model.reasoning and not channels:
            return None
        reader = ChannelsReader if channels else PartsReader
        return partial(reader, calls=calls, max_calls=body.max_calls, forced=bool(body.forced_functions))

    def make_id_factory(self, messages: Sequence[Message]) -> Callable[[str, int], str]:
        """Return a function that creates the ids of the next calls in a conversation."""
        earlier = sum(len(message.tool_calls or ()) for message in messages)
        return lambda name, number: self.model.tool_format.new_id(name, earlier + number)

    async def _complete(
        self,
        body: AnswerBody,
        answer: AnswerBuilder,
        encode: Callable[[], Awaitable[list[list[int]]]],
        request: Request,
    ) -> Response:
        began = perf_counter()
        self.find_adapter(body.model)
        self.check_capacity()

        async def respond() -> Response:
            stream = await run_while_connected(self._begin(body, answer, encode), request.receive)
            exchange = Exchange(stream, answer, self.metrics, began)
            request.state.model, request.state.usage = body.model, exchange.usage
            if not body.stream:
                return await exchange.json_response(request)
            return self.stream(exchange.events(), exchange.close, "text/event-stream")

        return await self.count_answering(respond())

    async def _begin(
        self, body: AnswerBody, answer: AnswerBuilder, encode: Callable[[], Awaitable[list[list[int]]]]
    ) -> Stream:
        """Encode the request and submit it to the engine."""
        self.entering += body.num_choices
        try:
            prompts = await encode()
            if isinstance(body, ChatBody) and (self.model.reasoning or self.model.tool_format.channels):
                answer.beginning = self._detect_beginning(body, prompts[0])
            constraint = None
            if body.is_constrained:
                compile_schema = partial(self._constraints.make_constraint, body, answer.beginning)
                constraint = await self.lanes.run("schema", compile_schema)
            await self.gate.enter()
            requests = self._requests(body, prompts, constraint)
            return await self.thread.submit(requests, per_token=body.stream)
        finally:
            self.entering -= body.num_choices

    def find_adapter(self, model: str) -> str | None:
        """Return the name of the adapter; None for the model itself.

        Raises:
            ApiError: 404, when `model` names neither.
        """
        if model not in self.model.names:
            raise unknown_model_error(model, *self.model.names)
        return None if model == self.model.name else model

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request that does not go through the engine's queue, during the block.

        Raises:
            ApiError: 429, when the queue is full; 503, when the model sleeps.
        """
        self.check_capacity()
        self.entering += 1
        self.answering += 1
        try:
            yield
        finally:
            self.entering -= 1
            self.answering -= 1

    def check_capacity(self) -> None:
        self.gate.check_awake()
        super().check_capacity()

    def _requests(
        self, body: AnswerBody, prompts: Sequence[list[int]], constraint: Constraint | None
    ) -> list[EngineRequest]:
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        room = self.prompts.count_remaining_tokens(max(map(len, prompts)), body.max_answer_tokens, param)
        params = self._params(body, body.max_answer_tokens or room)
        seed, step, task = body.random_key or (secrets.randbits(64), 0, 0)
        continues = not isinstance(body, ChatBody) or body.continue_final_message
        adapter = self.find_adapter(body.model)  # again, because it may have been unloaded meanwhile
        return [
            # Each prompt of a request has its own random numbers.
            EngineRequest(
                prompt,
                params,
                (seed, step, (task + index) % 2**32),
                body.n,
                constraint=constraint,
                adapter=adapter,
                returns_in=body.returns_in,
                continues_text=continues,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _params(self, body: AnswerBody, max_tokens: int) -> SamplingParams:
        outside = [token for token in (body.logit_bias or {}) if token >= self.model.vocab_size]
        if outside:
            raise ApiError(400, f"the vocabulary has no token {outside[0]}", param="logit_bias")
        return body.params(max_tokens, self.model.end_tokens, body.top_logprobs)

    def _detect_beginning(self, body: ChatBody, prompt: Sequence[int]) -> Beginning:
        text = body.messages[-1].text if body.continue_final_message else ""
        if self.model.tool_format.channels:
            return "content" if text else "channels"
        if text.strip():
            _, opened, thought = text.rpartition(THINK_START)
            return "reasoning" if opened and THINK_END not in thought else "content"
        ending = self.model.tokenizer.decode(prompt[-8:]).rstrip()
        return "reasoning" if ending.endswith(THINK_START) else "start"


def _token_bytes(model: ServedModel) -> list[bytes | None]:
    """Return the bytes of each token in the text of an answer, including those of the model's marks."""
    try:
        table = model.tokenizer.token_bytes()
    except RequestError:  # a tokenizer without bytes of single tokens
        return []
    for mark in model.marks:
        if (index := model.tokenizer.control_tokens.get(mark)) is not None:
            table[index] = mark.encode()
    return table
