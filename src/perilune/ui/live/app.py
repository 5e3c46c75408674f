"""The routes of the live page. They read files and the record of runs, and change nothing."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

import perilune
from perilune.control.queries.comparison import compare_experiments
from perilune.control.runs.experiments import Control
from perilune.errors import PeriluneError, RequestError
from perilune.ui.attempt import Attempt
from perilune.ui.collect import collect_report
from perilune.ui.episode_sets import find_source, read_set
from perilune.ui.episodes import EpisodeSource
from perilune.ui.experiment import view_in_home
from perilune.ui.experiment_comparison import SCRIPTS as COMPARISON_SCRIPTS
from perilune.ui.experiment_comparison import comparison_document
from perilune.ui.live.access import Access
from perilune.ui.live.episode_index import IndexCache
from perilune.ui.live.listing import Listing
from perilune.ui.live.search import Filters, find_attempts, search
from perilune.ui.live.watch import Event, Offsets, Watch, file_offsets
from perilune.ui.report import (
    LIVE_SCRIPTS,
    PAGE_SCRIPTS,
    render_page,
    render_report,
    report_document,
    to_plain,
)

POLL_INTERVAL_S = 0.5
MAX_POLL_INTERVAL_S = 1.5
POLL_INTERVAL_FACTOR = 250  # polling takes at most 1/250 of the time, up to `MAX_POLL_INTERVAL_S`
MAX_STREAMS = 64
MAX_COMPARED = 32
DEFAULT_EXPERIMENTS = 50  # listed experiments without ?last=
LIST_SCRIPTS = (*PAGE_SCRIPTS, "list.js")

Kind = Literal["experiments", "runs"]
Last = Annotated[int, Query(ge=1, le=1000)]


def make_app(control: Control, token: str | None) -> FastAPI:
    """Return the application that shows one home. `token` is as in `Access`."""
    app = FastAPI(title="perilune ui", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Access, token=token)
    app.add_exception_handler(PeriluneError, _error_response)
    app.state.closing = False
    footer = f"Perilune {perilune.__version__} reads {control.home.root} and changes nothing."
    listing, indexes, streams = Listing(control), IndexCache(), asyncio.Semaphore(MAX_STREAMS)

    @app.get("/", response_class=HTMLResponse)
    def index(last: Last = DEFAULT_EXPERIMENTS) -> str:
        return render_page("Perilune", LIST_SCRIPTS, listing.document(last), live=True)

    @app.get("/experiments.json")
    def experiments(last: Last = DEFAULT_EXPERIMENTS) -> JSONResponse:
        return JSONResponse(listing.document(last))

    @app.get("/events", response_model=None)
    def list_events(request: Request, last: Last = DEFAULT_EXPERIMENTS) -> StreamingResponse:
        return _stream_events(request, _poll_list(listing, last), streams)

    @app.get("/compare/{targets}", response_class=HTMLResponse)
    def comparison(targets: str) -> str:
        chosen = targets.split(",")
        if len(chosen) > MAX_COMPARED:
            raise RequestError(f"{len(chosen)} experiments are selected, but a page compares {MAX_COMPARED}")
        document = comparison_document(compare_experiments(control, chosen))
        document |= {"footer": footer, "index": "/"}
        return render_page(f"Comparison: {document['title']}", COMPARISON_SCRIPTS, document, live=True)

    @app.get("/{kind}/{target}", response_class=HTMLResponse)
    def page(kind: Kind, target: str) -> str:
        view = view_in_home(control, target)
        offsets = file_offsets(view)
        base = f"/{kind}/{target}"
        data = replace(collect_report(view, embed=False), footer=footer)
        return render_report(data, LIVE_SCRIPTS, live={"base": base, "offsets": offsets})

    @app.get("/{kind}/{target}/document.json")
    def document(kind: Kind, target: str) -> JSONResponse:
        return JSONResponse(report_document(collect_report(view_in_home(control, target), embed=False)))

    def sources_of(target: str) -> list[EpisodeSource]:
        stages = view_in_home(control, target).stages
        return [EpisodeSource(stage.name, stage.task, Attempt(stage.attempt_dir)) for stage in stages]

    @app.get("/{kind}/{target}/episodes/{stage}/{name}")
    def episodes(kind: Kind, target: str, stage: str, name: str, episode: str = "") -> JSONResponse:
        return JSONResponse(read_set(sources_of(target), stage, name, episode))

    @app.get("/{kind}/{target}/episodes/{stage}", response_model=None)
    def found(
        request: Request, kind: Kind, target: str, stage: str, filters: Annotated[Filters, Query()]
    ) -> StreamingResponse:
        source = find_source(stage, sources_of(target))
        return _stream_items(request, search(source, indexes.of(source), filters), streams)

    @app.get("/{kind}/{target}/attempts", response_model=None)
    def attempts(request: Request, kind: Kind, target: str, task: str) -> StreamingResponse:
        return _stream_items(request, find_attempts(task, sources_of(target), indexes.of), streams)

    @app.get("/{kind}/{target}/events", response_model=None)
    def events(
        request: Request,
        kind: Kind,
        target: str,
        offsets: str = "{}",
        last_event_id: Annotated[str, Header()] = "",
    ) -> StreamingResponse:
        view_in_home(control, target)  # an unknown target is an error, not an empty stream
        watch = Watch(lambda: view_in_home(control, target), _parse_offsets(last_event_id or offsets))
        return _stream_events(request, watch.poll, streams)

    return app


def _stream_events(
    request: Request, poll: Callable[[], Iterator[Event]], streams: asyncio.Semaphore
) -> StreamingResponse:
    """Return a stream of the events that `poll` finds, until the reader leaves."""

    def timed_poll() -> tuple[list[str], float]:
        began = time.thread_time()
        new = [event.encode() for event in poll()]
        return new, time.thread_time() - began

    async def events() -> AsyncIterator[str]:
        async with streams:
            yield "retry: 1000\n\n"
            while not request.app.state.closing and not await request.is_disconnected():
                new, seconds = await run_in_threadpool(timed_poll)
                for event in new:
                    yield event
                pause = max(POLL_INTERVAL_S, POLL_INTERVAL_FACTOR * seconds)
                await asyncio.sleep(min(pause, MAX_POLL_INTERVAL_S))

    return StreamingResponse(events(), media_type="text/event-stream")


def _stream_items(request: Request, items: Iterator[Any], streams: asyncio.Semaphore) -> StreamingResponse:
    """Return a stream of `items` as events, until the last item or until the reader leaves."""

    async def events() -> AsyncIterator[str]:
        async with streams:
            while not request.app.state.closing and not await request.is_disconnected():
                item = await run_in_threadpool(next, items, None)
                if item is None:
                    return
                yield f"data: {json.dumps(to_plain(item))}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _poll_list(listing: Listing, last: int) -> Callable[[], Iterator[Event]]:
    known: dict[str, Any] = {}

    def poll() -> Iterator[Event]:
        document = listing.document(last)
        if document != known:
            known.clear()
            known.update(document)
            yield Event("list", document, {})

    return poll


def _parse_offsets(text: str) -> Offsets:
    """Parse the offsets that a browser sends; malformed offsets count as none."""
    try:
        document = json.loads(text)
        return {str(stage): [max(0, int(value)) for value in pair][:2] for stage, pair in document.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, RequestError) else 500)
