"""`perilune templates`: the templates that say where and how runs execute."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from perilune.cli.arguments import Json, make_command_group
from perilune.cli.output import echo, print_json
from perilune.control.record.home import Home
from perilune.control.runs.templates import RentedTarget, load_template, template_names

app = make_command_group("List, show and check templates, which say where and how runs execute.")

Name = Annotated[str, typer.Argument(metavar="ID", help="Name of a template, or the path of its file.")]


@app.command("list")
def list_templates(as_json: Json = False) -> None:
    """List the built-in templates and those in templates/ of the home directory.

    \b
    perilune templates list --json
    """
    home = Home.open()
    templates = {name: load_template(home, name) for name in template_names(home)}
    if as_json:
        print_json([{"id": name, **template.model_dump(mode="json")} for name, template in templates.items()])
        return
    width = max(map(len, templates))
    for name, template in templates.items():
        echo(f"{name:<{width}}  {template.placement.name:<5}  {template.description}".rstrip())


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show a template with all defaults filled in.

    \b
    perilune templates show local
    """
    document = load_template(Home.open(), name).model_dump(mode="json")
    if as_json:
        print_json(document)
        return
    echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())


@app.command()
def validate(name: Name, as_json: Json = False) -> None:
    """Check a template, and report the file, line and key of an error. Rents nothing and opens no connection.

    For a template that rents machines, also checks the kind of machine against providers.yaml.

    \b
    perilune templates validate gpu1.yaml
    """
    from perilune.control.machines.providers import Providers

    home = Home.open()
    template = load_template(home, name)
    target, providers = template.placement, Providers(home)
    if isinstance(target, RentedTarget) and providers.settings() is not None:
        for problem in providers.problems(target.provider, [target.kind]):
            raise problem
    if as_json:
        print_json({"valid": True, "placement": template.placement.name})
    else:
        where = "this machine" if template.placement.name == "local" else Path(name).stem
        echo(f"valid: runs go to {where}")
