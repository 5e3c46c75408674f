"""Commands that show runs and use checkpoints."""

COMMANDS = {
    "runs": ("inspect.runs:runs", "List runs."),
    "top": ("inspect.top:top", "Show running stages live."),
    "ui": ("inspect.ui:ui", "Serve a page that shows experiments live."),
    "show": ("inspect.runs:show", "Show the state, attempts, metrics and files of a run."),
    "logs": ("inspect.runs:logs", "Print the log of a run; -f follows it."),
    "explain": ("inspect.history:explain", "Explain the state of a run and what happens next."),
    "events": ("inspect.history:events", "Print recorded events."),
    "diff": ("inspect.history:diff", "Compare two runs."),
    "compare": ("inspect.compare:compare", "Compare experiments, or the arms of a sweep."),
    "report": ("inspect.report:report", "Write a self-contained HTML report."),
    "track": ("inspect.track:track", "Copy metrics to TensorBoard, W&B or MLflow."),
    "traces": ("inspect.traces:app", "Make regression tests of episodes, and run them."),
    "chat": ("inspect.chat:chat", "Chat with a checkpoint in the terminal."),
    "serve": ("inspect.serve:serve", "Serve a checkpoint over OpenAI's HTTP API."),
    "push": ("inspect.push:push", "Give a running server new weights."),
    "model": ("inspect.model:app", "Fetch, list, describe and export models."),
    "bundle": ("inspect.bundle:app", "Freeze, verify and inspect bundles."),
    "verify": ("inspect.integrity:verify", "Check files and records against their signatures."),
    "export": ("inspect.integrity:export", "Export a run with its signed statements."),
}
