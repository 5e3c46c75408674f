"""Commands about the machines that runs use."""

COMMANDS = {
    "templates": ("machines.templates:app", "List, show and check templates of machines."),
    "machines": ("machines.rented:app", "List rented machines and terminate them."),
    "cost": ("machines.rented:cost", "Show the cost of rented machines."),
    "secrets": ("machines.secrets:app", "Configure where secrets are read from."),
    "daemon": ("machines.daemon:daemon", "Keep runs going in the background."),
}
