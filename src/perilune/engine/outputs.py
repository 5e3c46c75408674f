"""Turns sampled tokens into completions and deltas.

A request is either collected (`Engine.sample` waits for all of its samples), streamed (one delta per token),
or returned sample by sample. A sample that needs more than its tokens, such as text or a constraint, is
tracked.

An error in a tracked sample (its grammar, its text) fails only the request of that sample.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import FinishReason
from perilune.data.routes import Routes
from perilune.engine.constraints import ConstraintState, mask_words
from perilune.engine.request import Completion, Delta, Request, TopLogprobs
from perilune.engine.routes import RouteStore
from perilune.engine.sampler import DrawnTokens
from perilune.engine.sequences import Entry, Rows, Sequences
from perilune.engine.text import TextStream
from perilune.errors import PeriluneError, WorkFailedError
from perilune.models.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class Collection:
    """The samples that one `Engine.sample` call waits for.

    Attributes:
        unfinished: number of missing samples.
        samples: by request, then by index.
        failure: the error of a failed request, if there is one.
    """

    def __init__(self, total: int) -> None:
        self.unfinished = total
        self.samples: dict[int, dict[int, Completion]] = {}
        self.failure: PeriluneError | None = None


@dataclass(slots=True, eq=False)
class TrackedSample:
    """The text, constraint and extra log-probs of one sample.

    Attributes:
        text: None without a tokenizer.
        constraint: None if the request has no constraint.
        raw_logprobs, top_logprobs: of all tokens so far; None if not requested.
    """

    text: TextStream | None
    constraint: ConstraintState | None
    raw_logprobs: list[float] | None
    top_logprobs: TopLogprobs | None

    @classmethod
    def begin(cls, request: Request, tokenizer: Tokenizer | None) -> TrackedSample:
        """Return the state before the first sampled token."""
        params = request.params
        sampled = request.token_ids[len(request.token_ids) - request.position :]
        return cls(
            text=None if tokenizer is None else _resume_text(tokenizer, params.stop, sampled),
            constraint=None if request.constraint is None else request.constraint.start(sampled),
            raw_logprobs=[] if params.raw_logprobs else None,
            top_logprobs=[] if params.top_logprobs else None,
        )

    def add_token(self, token: int, *, is_stop: bool, may_stop: bool) -> bool:
        """Add a sampled token; return whether it completes a stop text. The text excludes stop tokens."""
        if self.constraint is not None:
            self.constraint.advance(token)
        if self.text is None or is_stop:
            return False
        self.text.push(token, may_stop=may_stop)
        return self.text.stopped


def _resume_text(tokenizer: Tokenizer, stop: tuple[str, ...], token_ids: list[int]) -> TextStream:
    """Return the text stream of a resumed sample after its earlier tokens; a stop text may begin in them."""
    text = TextStream(tokenizer, stop)
    for token in token_ids:
        text.push(token, may_stop=False)
    text.take_text(last=True)
    return text


def needs_tracking(request: Request) -> bool:
    """Return whether the samples of `request` must be tracked even if it is not streamed."""
    params = request.params
    return bool(params.stop or params.raw_logprobs or params.top_logprobs or request.constraint)


class OutputProcessor:
    """The outputs of all requests in flight.

    Args:
        routes: the store of recorded routes, from which each whole sample gets its own; None if the engine
            records none.

    Attributes:
        entries: requests by id.
        pending: deltas that `Engine.step` has not returned yet.
        failures: errors by row. The engine drops the requests of these rows, and then clears the dictionary.
    """

    def __init__(
        self, sequences: Sequences, tokenizer: Tokenizer | None, routes: RouteStore | None = None
    ) -> None:
        self._sequences, self._tokenizer, self._routes = sequences, tokenizer, routes
        self._continuing = None if tokenizer is None else tokenizer.continuing()
        self.entries: dict[int, Entry] = {}
        self.pending: list[Delta] = []
        self.failures: dict[int, PeriluneError] = {}
        self._collections: dict[int, Collection] = {}  # by id of a collected request
        self._streams: dict[int, bool] = {}  # by id of a tracked request, whether it is streamed
        self._tracked: dict[int, TrackedSample] = {}  # by row

    def register(self, entry: Entry, collection: Collection | None, *, stream: bool) -> None:
        """Register a request, whose samples go to `collection`, or to deltas if it is None."""
        self.entries[entry.id] = entry
        if collection is not None:
            self._collections[entry.id] = collection
            collection.samples[entry.id] = {}
        if stream or needs_tracking(entry.request):
            self._streams[entry.id] = stream

    def drop(self, entry: Entry, rows: list[int]) -> None:
        """Remove a request; `rows` are its samples in flight."""
        del self.entries[entry.id]
        for row in rows:
            self._tracked.pop(row, None)
        self._collections.pop(entry.id, None)
        self._streams.pop(entry.id, None)
        self.pending = [delta for delta in self.pending if delta.request_id != entry.id]

    def make_masks(self, rows: Rows) -> dict[int, NDArray[np.int32]]:
        """Start tracking new samples, and return masks of the tokens that constraints allow, by row."""
        masks: dict[int, NDArray[np.int32]] = {}
        for row in rows.tolist() if self._streams else []:
            entry = self._sequences.entries[row]
            if row not in self._tracked and entry is not None and entry.id in self._streams:
                with self._catch_failure(row):
                    self._tracked[row] = TrackedSample.begin(entry.request, self._tokenizer_of(entry.request))
            tracked = self._tracked.get(row)
            if tracked is not None and tracked.constraint is not None:
                mask = np.zeros(mask_words(self._sequences.vocab_size), dtype=np.int32)
                with self._catch_failure(row):
                    tracked.constraint.fill_mask(mask)
                    masks[row] = mask
        return masks

    def process(self, rows: Rows, drawn: DrawnTokens, version: int) -> list[int]:
        """Add one token to each of `rows`, and return the rows whose samples have ended."""
        stopped = self._sequences.ends_with_stop_token(rows)
        ended = stopped | (self._sequences.length[rows] >= self._sequences.limit[rows])
        if self._tracked:
            for index, row in enumerate(rows.tolist()):
                if row in self._tracked and row not in self.failures:
                    with self._catch_failure(row):
                        self._update_tracked(row, drawn, index, (stopped, ended), version)
        finished = []
        for row, is_stop in zip(rows[ended].tolist(), stopped[ended].tolist(), strict=True):
            if row not in self.failures:
                with self._catch_failure(row):
                    self._finish(row, self._finish_reason(row, is_stop))
                    finished.append(row)
        return finished

    def fail(self, entry: Entry, row: int, rows: list[int], failure: PeriluneError) -> None:
        """Report the failure of the sample in `row`, one of the `rows` of `entry`, and remove the request."""
        collection = self._collections.get(entry.id)
        self.drop(entry, rows)
        if collection is not None:
            collection.failure = failure
        else:
            sample = int(self._sequences.sample[row])
            self.pending.append(Delta(entry.id, sample, [], [], [], finish_reason="aborted", failure=failure))

    @contextmanager
    def _catch_failure(self, row: int) -> Iterator[None]:
        """Store an error of the block in `failures`, as the error of the sample in `row`."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except PeriluneError as failure:
            self.failures[row] = failure
        except BaseException as error:  # panics in grammars and tokenizers are not Exceptions
            _log.exception("a sample failed")
            self.failures[row] = WorkFailedError(
                f"the text or constraint of a sample failed with {type(error).__name__}", remedy="see the log"
            )

    def _update_tracked(
        self, row: int, drawn: DrawnTokens, index: int, ends: tuple[NDArray[np.bool_], ...], version: int
    ) -> None:
        """Add the new token to a tracked sample, and create a delta if the request is streamed."""
        stopped, ended = ends
        tracked, sequences = self._tracked[row], self._sequences
        token = int(drawn.token_ids[index])
        may_stop = bool(sequences.length[row] >= sequences.min_length[row])
        if tracked.add_token(token, is_stop=bool(stopped[index]), may_stop=may_stop):
            stopped[index] = ended[index] = True
        if tracked.raw_logprobs is not None:
            tracked.raw_logprobs.append(drawn.raw_logprobs[index])
        if tracked.top_logprobs is not None:
            tracked.top_logprobs.append(drawn.top_logprobs[index])
        entry = sequences.entries[row]
        assert entry is not None
        if not self._streams[entry.id]:
            return
        last = bool(ended[index])
        if last and tracked.text is not None:
            tracked.text.finish()
        self.pending.append(
            Delta(
                entry.id,
                int(sequences.sample[row]),
                [token],
                [float(drawn.logprobs[index])],
                [version],
                "" if tracked.text is None else tracked.text.take_text(last=last),
                self._finish_reason(row, bool(stopped[index])) if last else None,
                None if tracked.raw_logprobs is None else tracked.raw_logprobs[-1:],
                None if tracked.top_logprobs is None else tracked.top_logprobs[-1:],
                int(sequences.cached[row]),
            )
        )

    def _finish_reason(self, row: int, is_stop: bool) -> FinishReason:
        """Return the finish reason: "aborted" when the constraint of the sample allows no further token."""
        tracked = self._tracked.get(row)
        if tracked is not None and tracked.constraint is not None and tracked.constraint.failure:
            return "aborted"
        return "stop" if is_stop else "length"

    def _finish(self, row: int, reason: FinishReason) -> None:
        """Deliver a sample that has ended."""
        entry = self._sequences.entries[row]
        assert entry is not None
        collection = self._collections.get(entry.id)
        if collection is not None:
            collection.samples[entry.id][int(self._sequences.sample[row])] = self.make_completion(row, reason)
            collection.unfinished -= 1
        elif not self._streams.get(entry.id):
            self.pending.append(self._make_delta(row, entry, self.make_completion(row, reason)))
        self._tracked.pop(row, None)
        entry.unfinished -= 1
        if not entry.unfinished:
            del self.entries[entry.id]
            self._streams.pop(entry.id, None)
            self._collections.pop(entry.id, None)

    def partial_completion(self, row: int) -> Completion:
        """Return the tokens, log-probs and versions of an unfinished sample so far."""
        sequences = self._sequences
        sampled = slice(int(sequences.prompt_length[row]), int(sequences.length[row]))
        return Completion(
            sequences.tokens[row, sampled].copy(),
            sequences.logprobs[row, sampled].copy(),
            sequences.versions[row, sampled].copy(),
            "aborted",
        )

    def make_completion(self, row: int, reason: FinishReason) -> Completion:
        """Return a sample that ends now."""
        partial, tracked = self.partial_completion(row), self._tracked.get(row)
        text = raw = top = None
        if tracked is not None:
            raw = None if tracked.raw_logprobs is None else np.array(tracked.raw_logprobs, dtype=np.float32)
            top = tracked.top_logprobs
            if tracked.text is not None:
                tracked.text.finish()
                text = tracked.text.text
        return replace(
            partial,
            finish_reason=reason,
            text=text,
            raw_logprobs=raw,
            top_logprobs=top,
            routed_experts=self._gather_routes(row),
        )

    def _gather_routes(self, row: int) -> Routes | None:
        """Return the routes of all computed tokens of a sample.

        After a weight update with recomputation, all routes are those of the new weights. `Trajectory.routes`
        marks those of tokens that older weights sampled as missing. After an update without recomputation,
        the routes are those of the weights that computed each token, and the routes of the prompt are marked
        as missing.
        """
        if self._routes is None:
            return None
        sequences = self._sequences
        routes = self._routes.gather(sequences.table(row), int(sequences.computed[row]))
        if sequences.stale[row]:
            routes[: sequences.prompt_length[row] - 1] = self._routes.missing
        return routes

    def _tokenizer_of(self, request: Request) -> Tokenizer | None:
        return self._continuing if request.continues_text else self._tokenizer

    def _make_delta(self, row: int, entry: Entry, sample: Completion) -> Delta:
        """Return a whole sample as one delta."""
        text, tokenizer = sample.text, self._tokenizer_of(entry.request)
        if text is None and tokenizer is not None:
            tokens = sample.token_ids.tolist()
            text = tokenizer.decode(tokens[: len(tokens) - (sample.finish_reason == "stop")])
        return Delta(
            entry.id,
            int(self._sequences.sample[row]),
            sample.token_ids.tolist(),
            sample.logprobs.tolist(),
            sample.policy_version.tolist(),
            text or "",
            sample.finish_reason,
            None if sample.raw_logprobs is None else sample.raw_logprobs.tolist(),
            sample.top_logprobs,
            int(self._sequences.cached[row]),
            routed_experts=sample.routed_experts,
        )
