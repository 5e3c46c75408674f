"""Deliveries: who waits for which sample, and what it is told when.

A request is either collected (`Engine.sample` waits for all of its samples), streamed (a delta a token), or
handed over sample by sample. Samples with more to look after than tokens, such as a text, are followed.

An error in following one sample (its grammar, its text) fails the request of that sample alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import FinishReason
from perilune.engine.constraints import ConstraintState, mask_words
from perilune.engine.request import Completion, Delta, Request, TopLogprobs
from perilune.engine.sampler import Drawn
from perilune.engine.sequences import Entry, Rows, Sequences
from perilune.engine.text import TextStream
from perilune.errors import PeriluneError, WorkFailedError
from perilune.models.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class Collection:
    """Samples that `Engine.sample` waits for.

    Attributes:
        unfinished: how many are missing.
        samples: by request, then by index.
        failure: why one of the requests failed.
    """

    def __init__(self, total: int) -> None:
        self.unfinished = total
        self.samples: dict[int, dict[int, Completion]] = {}
        self.failure: PeriluneError | None = None


@dataclass(slots=True, eq=False)
class TrackedSample:
    """What is kept of one such sample.

    Attributes:
        text: None without a tokenizer.
        constraint: None without one.
        raw_logprobs, top_logprobs: of all tokens so far; None when not asked for.
    """

    text: TextStream | None
    constraint: ConstraintState | None
    raw_logprobs: list[float] | None
    top_logprobs: TopLogprobs | None

    @classmethod
    def begin(cls, request: Request, tokenizer: Tokenizer | None) -> TrackedSample:
        """Before the first token that is to be sampled."""
        params = request.params
        own = request.token_ids[len(request.token_ids) - request.position :]
        return cls(
            text=None if tokenizer is None else TextStream(tokenizer, params.stop),
            constraint=None if request.constraint is None else request.constraint.start(own),
            raw_logprobs=[] if params.raw_logprobs else None,
            top_logprobs=[] if params.top_logprobs else None,
        )

    def take(self, token: int, *, is_stop: bool, may_stop: bool) -> bool:
        """Take the token that was drawn; whether its text ended the sample. Stop tokens are not text."""
        if self.constraint is not None:
            self.constraint.advance(token)
        if self.text is None or is_stop:
            return False
        self.text.push(token, may_stop=may_stop)
        return self.text.stopped


def needs_tracking(request: Request) -> bool:
    """Whether the samples of `request` cannot be left alone until they have ended."""
    params = request.params
    return bool(params.stop or params.raw_logprobs or params.top_logprobs or request.constraint)


class OutputProcessor:
    """Of all requests in flight.

    Attributes:
        entries: by id.
        undelivered: deltas that nobody has been given yet.
        failures: by row, why its request is to be given up; emptied by the engine.
    """

    def __init__(self, sequences: Sequences, tokenizer: Tokenizer | None) -> None:
        self._sequences, self._tokenizer = sequences, tokenizer
        self.entries: dict[int, Entry] = {}
        self.pending: list[Delta] = []
        self.failures: dict[int, PeriluneError] = {}
        self._collections: dict[int, Collection] = {}  # of requests whose samples are collected
        self._following: dict[int, bool] = {}  # of requests whose samples are followed: whether as a stream
        self._followed: dict[int, TrackedSample] = {}  # by row

    def expect(self, entry: Entry, collection: Collection | None, *, stream: bool) -> None:
        """Somebody waits for `entry`, collecting it, or else in deltas."""
        self.entries[entry.id] = entry
        if collection is not None:
            self._collections[entry.id] = collection
            collection.samples[entry.id] = {}
        if stream or needs_tracking(entry.request):
            self._following[entry.id] = stream

    def drop(self, entry: Entry, rows: list[int]) -> None:
        """Nobody waits for `entry` any more; `rows` are what it has in flight."""
        del self.entries[entry.id]
        for row in rows:
            self._followed.pop(row, None)
        self._collections.pop(entry.id, None)
        self._following.pop(entry.id, None)
        self.pending = [delta for delta in self.pending if delta.request_id != entry.id]

    def masks(self, rows: Rows) -> dict[int, NDArray[np.int32]]:
        """By row, the tokens that a constraint allows. Samples are followed from before their first token."""
        masks: dict[int, NDArray[np.int32]] = {}
        for row in rows.tolist() if self._following else []:
            entry = self._sequences.entries[row]
            if row not in self._followed and entry is not None and entry.id in self._following:
                with self._failing(row):
                    self._followed[row] = TrackedSample.begin(entry.request, self._tokenizer)
            its = self._followed.get(row)
            if its is not None and its.constraint is not None:
                mask = np.zeros(mask_words(self._sequences.vocab_size), dtype=np.int32)
                with self._failing(row):
                    its.constraint.fill_mask(mask)
                    masks[row] = mask
        return masks

    def process(self, rows: Rows, drawn: Drawn, version: int) -> list[int]:
        """Tell what samples have gained; returns the rows of those that have ended."""
        stopped = self._sequences.stopped(rows)
        ended = stopped | (self._sequences.length[rows] >= self._sequences.limit[rows])
        if self._followed:
            for index, row in enumerate(rows.tolist()):
                if row in self._followed and row not in self.failures:
                    with self._failing(row):
                        self._follow(row, drawn, index, (stopped, ended), version)
        finished = []
        for row, is_stop in zip(rows[ended].tolist(), stopped[ended].tolist(), strict=True):
            if row not in self.failures:
                with self._failing(row):
                    self._finish(row, self._reason(row, is_stop))
                    finished.append(row)
        return finished

    def fail(self, entry: Entry, row: int, rows: list[int], failure: PeriluneError) -> None:
        """Tell who waits for `entry` that its sample in `row`, one of its `rows`, failed it."""
        collection = self._collections.get(entry.id)
        self.drop(entry, rows)
        if collection is not None:
            collection.failure = failure
        else:
            sample = int(self._sequences.sample[row])
            self.pending.append(Delta(entry.id, sample, [], [], [], finish_reason="aborted", failure=failure))

    @contextmanager
    def _failing(self, row: int) -> Iterator[None]:
        """Let an error fail the request of `row`, and nothing else."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except PeriluneError as failure:
            self.failures[row] = failure
        except BaseException as error:  # grammars and tokenizers panic with what is not an Exception
            _log.exception("a sample failed")
            self.failures[row] = WorkFailedError(f"the sample failed: {type(error).__name__}")

    def _follow(
        self, row: int, drawn: Drawn, index: int, ends: tuple[NDArray[np.bool_], ...], version: int
    ) -> None:
        """Take the new token of a sample into account, and deliver it where deltas are wanted."""
        stopped, ended = ends
        its, sequences = self._followed[row], self._sequences
        token = int(drawn.token_ids[index])
        may_stop = bool(sequences.length[row] >= sequences.min_length[row])
        if its.take(token, is_stop=bool(stopped[index]), may_stop=may_stop):
            stopped[index] = ended[index] = True
        if its.raw_logprobs is not None:
            its.raw_logprobs.append(drawn.raw_logprobs[index])
        if its.top_logprobs is not None:
            its.top_logprobs.append(drawn.top_logprobs[index])
        entry = sequences.entries[row]
        assert entry is not None
        if not self._following[entry.id]:
            return
        last = bool(ended[index])
        if last and its.text is not None:
            its.text.finish()
        self.pending.append(
            Delta(
                entry.id,
                int(sequences.sample[row]),
                [token],
                [float(drawn.logprobs[index])],
                [version],
                "" if its.text is None else its.text.take(last=last),
                self._reason(row, bool(stopped[index])) if last else None,
                None if its.raw_logprobs is None else its.raw_logprobs[-1:],
                None if its.top_logprobs is None else its.top_logprobs[-1:],
                int(sequences.cached[row]),
            )
        )

    def _reason(self, row: int, is_stop: bool) -> FinishReason:
        """Why the sample ends: one whose constraint lets nothing follow is given up, and is no answer."""
        its = self._followed.get(row)
        if its is not None and its.constraint is not None and its.constraint.failed:
            return "aborted"
        return "stop" if is_stop else "length"

    def _finish(self, row: int, reason: FinishReason) -> None:
        """Hand over a sample that has ended."""
        entry = self._sequences.entries[row]
        assert entry is not None
        collection = self._collections.get(entry.id)
        if collection is not None:
            collection.samples[entry.id][int(self._sequences.sample[row])] = self.completion(row, reason)
            collection.unfinished -= 1
        elif not self._following.get(entry.id):
            self.pending.append(self._whole(row, entry, self.completion(row, reason)))
        self._followed.pop(row, None)
        entry.unfinished -= 1
        if not entry.unfinished:
            del self.entries[entry.id]
            self._following.pop(entry.id, None)
            self._collections.pop(entry.id, None)

    def completion(self, row: int, reason: FinishReason) -> Completion:
        """What a sample has so far."""
        sequences, its = self._sequences, self._followed.get(row)
        sampled = slice(int(sequences.prompt_length[row]), int(sequences.length[row]))
        text = raw = top = None
        if its is not None:
            raw = None if its.raw_logprobs is None else np.array(its.raw_logprobs, dtype=np.float32)
            top = its.top_logprobs
            if its.text is not None:
                its.text.finish()
                text = its.text.text
        return Completion(
            sequences.tokens[row, sampled].copy(),
            sequences.logprobs[row, sampled].copy(),
            sequences.versions[row, sampled].copy(),
            reason,
            text,
            raw,
            top,
        )

    def _whole(self, row: int, entry: Entry, one: Completion) -> Delta:
        """A sample in one delta."""
        text = one.text
        if text is None and self._tokenizer is not None:
            tokens = one.token_ids.tolist()
            text = self._tokenizer.decode(tokens[: len(tokens) - (one.finish_reason == "stop")])
        return Delta(
            entry.id,
            int(self._sequences.sample[row]),
            one.token_ids.tolist(),
            one.logprobs.tolist(),
            one.policy_version.tolist(),
            text or "",
            one.finish_reason,
            None if one.raw_logprobs is None else one.raw_logprobs.tolist(),
            one.top_logprobs,
            int(self._sequences.cached[row]),
        )
