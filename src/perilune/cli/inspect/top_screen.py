"""The live table of `perilune top` as a Textual application. It only watches; runs do not depend on it."""

import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from perilune.cli.inspect.history import explanation_lines
from perilune.cli.inspect.run_table import COLUMNS, LiveStage, live_stages
from perilune.cli.output import format_for_terminal
from perilune.control.queries.explanation import explain_run
from perilune.control.runs.experiments import Control
from perilune.control.runs.requests import request_cancel
from perilune.errors import PeriluneError
from perilune.execution.log import log_tail
from perilune.terminal import escape_control

CONFIRM_SECONDS = 3.0  # seconds within which a second x confirms
LOG_LINES = 12  # last lines of the log
STATE_COLORS = {
    "active": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "queued": "blue",
}


class Screen(App[None]):
    """The table above, the log or the explanation of the selected run below.

    Args:
        experiments: number of experiments, the latest first.
        every: seconds between two refreshes.
    """

    CSS = """
    DataTable { height: 1fr; }
    #below { height: 14; border-top: solid $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "exit"),
        ("c", "copy", "copy id"),
        ("l", "show('log')", "log"),
        ("e", "show('why')", "explain"),
        ("x", "cancel", "cancel"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, control: Control, experiments: int, every: float) -> None:
        super().__init__()
        self._control, self._experiments, self._every = control, experiments, every
        self._rows: list[LiveStage] = []
        self._below = "log"
        self._confirm = ("", 0.0)  # the run to cancel, and when x was pressed

    def compose(self) -> ComposeResult:
        yield DataTable[Text](cursor_type="row", zebra_stripes=True)
        yield Static(id="below", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Start to refresh the table."""
        self.title = "perilune"
        table = self.query_one(DataTable)
        for name in COLUMNS:
            table.add_column(name, key=name)
        self.run_worker(self._refresh, thread=True, name="refresh")

    def _refresh(self) -> None:
        """Read the state of runs until the application ends; in a thread, because machines may be slow."""
        worker = get_current_worker()
        while not worker.is_cancelled:
            try:
                stages = live_stages(self._control, self._experiments)
            except PeriluneError as error:
                self.call_from_thread(self.notify, str(error), severity="error")
            else:
                self.call_from_thread(self._show, stages)
            time.sleep(self._every)

    def _show(self, stages: list[LiveStage]) -> None:
        table = self.query_one(DataTable)
        shape = [(row.status.experiment_id, row.status.name) for row in stages]
        if shape != [(row.status.experiment_id, row.status.name) for row in self._rows]:
            before = self._selected_row
            table.clear()
            for row in stages:
                table.add_row(*self._cells(row), key=f"{row.status.experiment_id}/{row.status.name}")
            positions = [
                index
                for index, row in enumerate(stages)
                if (row.status.run_id == before.status.run_id if before else row.status.state == "active")
            ]
            table.move_cursor(row=positions[0] if positions else 0)
        else:
            for index, row in enumerate(stages):
                for column, cell in enumerate(self._cells(row)):
                    table.update_cell_at(Coordinate(index, column), cell, update_width=True)
        self._rows = stages
        self._show_details()

    def _cells(self, row: LiveStage) -> list[Text]:
        cells = [Text(escape_control(cell)) for cell in row.cells()]
        cells[2].stylize(STATE_COLORS.get(row.status.state, ""))
        return cells

    @property
    def _selected_row(self) -> LiveStage | None:
        index = self.query_one(DataTable).cursor_row
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def on_data_table_row_highlighted(self) -> None:
        """Show the run that was selected."""
        self._show_details()

    def _show_details(self) -> None:
        row = self._selected_row
        self.query_one("#below", Static).update(
            format_for_terminal("no runs yet; try: perilune quickstart")
            if row is None
            else self._details(row)
        )

    def _details(self, row: LiveStage) -> str:
        status = row.status
        if not status.run_id:
            return f"{status.name} waits for earlier stages"
        if self._below == "why":
            lines = explanation_lines(explain_run(self._control, status.run_id))
            return format_for_terminal("\n".join(line.strip() for line in lines))
        text = log_tail(status.attempt_dir / "runtime", LOG_LINES) if status.attempt_dir else ""
        return escape_control(text) or "the log is empty"

    def action_show(self, what: str) -> None:
        """Show the log, or the explanation of the state."""
        self._below = what
        self._show_details()

    def action_copy(self) -> None:
        """Copy the run's id to the clipboard of the machine that shows the terminal, with OSC 52."""
        row = self._selected_row
        if row is not None and row.status.run_id:
            self.copy_to_clipboard(row.status.run_id)
            self.notify(f"copied {row.status.run_id}")

    def action_cancel(self) -> None:
        """Cancel the run when x was pressed twice."""
        row = self._selected_row
        if row is None or row.status.state not in {"active", "queued"}:
            self.notify(
                "no run is selected" if row is None else f"{row.status.name} is {row.status.display_state}"
            )
            return
        run, moment = row.status.run_id, time.monotonic()
        if self._confirm[0] != run or moment - self._confirm[1] > CONFIRM_SECONDS:
            self._confirm = (run, moment)
            self.notify(f"press x again to cancel {row.status.name}", severity="warning")
            return
        try:
            request_cancel(self._control, run)
        except PeriluneError as error:
            self.notify(str(error), severity="error")
        else:
            self.notify(f"{row.status.name} is being stopped")
