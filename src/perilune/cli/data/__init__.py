"""Commands about training data, environments and the sandbox."""

COMMANDS = {
    "environments": ("data.environments:app", "List, sample, check and audit environments."),
    "data": ("data.records:app", "Generate, filter, convert and inspect training data."),
    "sandbox": ("data.sandbox:app", "Audit the sandbox that runs code written by a model."),
}
