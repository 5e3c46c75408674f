"""The live table, as a Textual application. It looks; the runs go on without it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from perilune.cli.top import COLUMNS, Row, rows
from perilune.control.queries.explanation import explain
from perilune.control.runs.requests import request_cancel
from perilune.errors import PeriluneError
from perilune.execution.log import log_tail
from perilune.terminal import printable

if TYPE_CHECKING:
    from perilune.control.runs.experiments import Control

CERTAIN_SECONDS = 3.0  # within which a second x means it
LOG_LINES = 12
COLOURS = {"active": "cyan", "succeeded": "green", "failed": "red", "cancelled": "yellow", "queued": "blue"}


class Screen(App[None]):
    """The table above, the chosen run's log or explanation below.

    Args:
        experiments: how many of the latest are shown.
        every: seconds between two looks.
    """

    CSS = """
    DataTable { height: 1fr; }
    #below { height: 14; border-top: solid $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "leave"),
        ("c", "copy", "copy id"),
        ("l", "show('log')", "log"),
        ("e", "show('why')", "explain"),
        ("x", "cancel", "cancel"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, control: Control, experiments: int, every: float) -> None:
        super().__init__()
        self._control, self._experiments, self._every = control, experiments, every
        self._rows: list[Row] = []
        self._below = "log"
        self._asked = ("", 0.0)  # which run to cancel, and when that was asked for

    def compose(self) -> ComposeResult:
        """The parts, from top to bottom."""
        yield DataTable[Text](cursor_type="row", zebra_stripes=True)
        yield Static(id="below", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.title = "perilune"
        table = self.query_one(DataTable)
        for name in COLUMNS:
            table.add_column(name, key=name)
        self.run_worker(self._look_again, thread=True, name="look")

    def _look_again(self) -> None:
        """Look at runs until the application ends; in a thread, because a look may take a while."""
        worker = get_current_worker()
        while not worker.is_cancelled:
            try:
                found = rows(self._control, self._experiments)
            except PeriluneError as error:
                self.call_from_thread(self.notify, str(error), severity="error")
            else:
                self.call_from_thread(self._show, found)
            time.sleep(self._every)

    def _show(self, found: list[Row]) -> None:
        table = self.query_one(DataTable)
        shape = [(row.status.experiment_id, row.status.name) for row in found]
        if shape != [(row.status.experiment_id, row.status.name) for row in self._rows]:
            kept = self._chosen
            table.clear()
            for row in found:
                table.add_row(*self._cells(row), key=f"{row.status.experiment_id}/{row.status.name}")
            places = [place for place, row in enumerate(found) if self._wanted(row, kept)]
            table.move_cursor(row=places[0] if places else 0)
        else:
            for place, row in enumerate(found):
                for column, cell in enumerate(self._cells(row)):
                    table.update_cell_at(Coordinate(place, column), cell, update_width=True)
        self._rows = found
        self._tell()

    @staticmethod
    def _wanted(row: Row, kept: Row | None) -> bool:
        """Whether the cursor belongs there: on what was chosen, in the beginning on what is under way."""
        return row.status.state == "active" if kept is None else row.status.run_id == kept.status.run_id

    def _cells(self, row: Row) -> list[Text]:
        cells = [Text(printable(cell)) for cell in row.cells()]
        cells[2].stylize(COLOURS.get(row.status.state, ""))
        return cells

    @property
    def _chosen(self) -> Row | None:
        place = self.query_one(DataTable).cursor_row
        return self._rows[place] if 0 <= place < len(self._rows) else None

    def on_data_table_row_highlighted(self) -> None:
        """Tell of the run that was chosen."""
        self._tell()

    def _tell(self) -> None:
        row = self._chosen
        self.query_one("#below", Static).update(
            "nothing yet; try: perilune quickstart" if row is None else self._told(row)
        )

    def _told(self, row: Row) -> str:
        status = row.status
        if not status.run_id:
            return f"{status.name} waits for the stages that it takes from"
        if self._below == "why":
            told = explain(self._control, status.run_id)
            lines = [*(f"because  {fact}" for fact in told.because), f"next     {told.next}"]
            return printable("\n".join([*lines, *(f"try      {command}" for command in told.commands)]))
        text = log_tail(status.attempt_dir / "runtime", LOG_LINES) if status.attempt_dir else ""
        return printable(text) or "nothing printed yet"

    def action_show(self, what: str) -> None:
        """Show the log, or why the run is in its state."""
        self._below = what
        self._tell()

    def action_copy(self) -> None:
        """Copy the run's id to the clipboard of the terminal's own machine: OSC 52."""
        row = self._chosen
        if row is not None and row.status.run_id:
            self.copy_to_clipboard(row.status.run_id)
            self.notify(f"copied {row.status.run_id}")

    def action_cancel(self) -> None:
        """Cancel the run when asked twice."""
        row = self._chosen
        if row is None or row.status.state not in {"active", "queued"}:
            self.notify("nothing is chosen" if row is None else f"{row.status.name} is {row.status.shown}")
            return
        run, moment = row.status.run_id, time.monotonic()
        if self._asked[0] != run or moment - self._asked[1] > CERTAIN_SECONDS:
            self._asked = (run, moment)
            self.notify(f"x again cancels {row.status.name}", severity="warning")
            return
        try:
            request_cancel(self._control, run)
        except PeriluneError as error:
            self.notify(str(error), severity="error")
        else:
            self.notify(f"{row.status.name} is told to stop")
