"""`perilune wiki`: a knowledge base of runs, whose numbers are queries over signed results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, ServerToken, make_command_group, open_control, read_token
from perilune.cli.output import echo, print_json, write
from perilune.errors import RequestError, WorkFailedError, did_you_mean

if TYPE_CHECKING:
    from perilune.control.runs.experiments import Control
    from perilune.wiki.build import BuildResult, Wiki

app = make_command_group("Compile a wiki of all runs, check it, and search it.")
Folder = Annotated[
    Path | None,
    typer.Option("--wiki", metavar="DIR", help="Folder of the wiki. Default: $PERILUNE_HOME/wiki."),
]
MAX_SHOWN = 20  # changes and pages that are listed


@app.command()
def build(
    wiki: Folder = None,
    overwrite: Annotated[
        bool, typer.Option(help="Also write pages whose generated text was edited by hand.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a page for each run, recipe, environment and algorithm, and fill in all numbers.

    Keeps your text between the `hand` markers of a page and on pages in the folder questions. Write a number
    there as {{ pass@1 of run ID }} or {{ mean pass@1 of recipe NAME stage STAGE }}. The same home gives the
    same pages, byte for byte. Exits with 1 if a citation has no answer, or if a page was not written because
    it was edited by hand.

    \b
    perilune wiki build
    perilune wiki build --wiki notes --json
    """
    from perilune.wiki.build import compile_wiki

    home, folder = _open_wiki(wiki)
    built = compile_wiki(folder, folder.facts(home), overwrite=overwrite)
    if as_json:
        print_json({"wiki": str(folder.root), **asdict(built)})
    else:
        _print_built(folder, built)
    if built.kept or built.unanswered:
        raise typer.Exit(1)


@app.command()
def lint(wiki: Folder = None, as_json: Json = False) -> None:
    """Check all pages against the evidence. Exits with 1 if there are findings.

    Verifies the signature and the figures of every run. Finds dead links, orphans, numbers that differ from
    the evidence, numbers without a citation, replaced runs, claims from few seeds or overlapping intervals,
    and more.

    \b
    perilune wiki lint
    perilune wiki lint --json
    """
    from perilune.wiki.lint import lint_wiki

    home, folder = _open_wiki(wiki)
    pages = folder.built_pages()
    findings = lint_wiki(pages, folder.facts(home, verify=True))
    if as_json:
        print_json(
            {"wiki": str(folder.root), "pages": len(pages), "findings": [asdict(item) for item in findings]}
        )
    else:
        for finding in findings:
            write(f"{finding}\n")
        echo(f"{len(pages)} pages, {len(findings)} findings")
    if findings:
        raise typer.Exit(1)


@app.command()
def search(
    question: Annotated[str, typer.Argument(help="Words to search for.")],
    wiki: Folder = None,
    most: Annotated[int, typer.Option("--most", min=1, help="Number of passages.")] = 6,
    as_json: Json = False,
) -> None:
    """Show the passages that best match a question.

    \b
    perilune wiki search "pass@1 after rl"
    """
    from perilune.wiki.search import search_wiki

    hits = search_wiki(_open_wiki(wiki)[1], question, most)
    if as_json:
        fields = ("page", "heading", "text")
        rows = [{name: getattr(hit, name) for name in fields} | {"score": score} for hit, score in hits]
        print_json({"passages": rows})
        return
    for hit, score in hits:
        write(f"{hit.page}.md  ({score:.1f})\n{hit.text}\n")
    if not hits:
        echo("no passage fits")


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    *,
    wiki: Folder = None,
    url: Annotated[
        str,
        typer.Option(
            "--url",
            help="URL of an OpenAI-compatible server. Without it, the answer is the passages themselves.",
        ),
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Name of the model on the server.")] = "default",
    token_env: ServerToken = "",
    file: Annotated[
        bool, typer.Option("--file", help="Save the answer as a page in the folder questions.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a question from the wiki, with sources.

    A model may only repeat numbers from the passages. If an answer has any other number, the command prints
    it, does not file it, and exits with 1.

    \b
    perilune wiki ask "which recipe reached the best pass@1?"
    """
    from perilune.servers import JsonClient, require_httpx
    from perilune.wiki import search as searching
    from perilune.wiki.markdown import make_slug, neutralize

    token = read_token(token_env)
    folder = _open_wiki(wiki)[1]
    passages = [passage for passage, _ in searching.search_wiki(folder, question)]
    text = "\n\n".join(f"[{index}] {passage.text}" for index, passage in enumerate(passages, 1))
    body = "\n".join(f"* [{passage.heading}](../{passage.page}.md)" for passage in passages)
    unsupported: tuple[str, ...] = ()
    if url and passages:
        require_httpx("--url")
        client = JsonClient(url, token=token, timeout=120.0, connections=1, attempts=2)
        try:
            reply = searching.ask_model(client, model, question, passages)
        finally:
            client.close()
        text, unsupported = reply.text, reply.unsupported
        body = searching.link_sources(text, passages)
    path = f"questions/{make_slug(question)}"
    if as_json:
        sources = [passage.page for passage in passages]
        print_json(
            {"question": question, "answer": text, "sources": sources, "unsupported_numbers": unsupported}
        )
    else:
        write(f"{text or 'no passage fits'}\n")
        for index, passage in enumerate(passages, 1):
            echo(f"[{index}] {passage.page}.md")
    if unsupported:
        raise WorkFailedError(
            f"the answer has numbers that no passage contains: {', '.join(unsupported)}",
            remedy="do not trust this answer; ask more precisely",
        )
    if file and passages:
        if (folder.root / f"{path}.md").exists():
            raise RequestError("this question has a page", where=f"{path}.md", remedy="edit it, or delete it")
        folder.write(f"{path}.md", f"# {neutralize(question)}\n\n{body}\n")
        echo(f"filed as {path}.md; `perilune wiki build` fills it in")


@app.command()
def slides(
    page: Annotated[str, typer.Argument(help="A page, such as recipes/quickstart.")], wiki: Folder = None
) -> None:
    """Print a page as slides for Marp.

    \b
    perilune wiki slides recipes/quickstart
    """
    from perilune.wiki.slides import render_slides

    folder = _open_wiki(wiki)[1]
    pages, name = folder.built_pages(), page.removesuffix(".md")
    if name not in pages:
        raise RequestError(f"there is no page '{name}'", remedy=did_you_mean(name, list(pages)))
    write(render_slides(pages[name], (folder.root / name).parent))


def _open_wiki(root: Path | None) -> tuple[Control, Wiki]:
    from perilune.wiki.build import Wiki

    control = open_control()
    return control, Wiki.of(control, root)


def _print_built(folder: Wiki, built: BuildResult) -> None:
    for change in built.changed[:MAX_SHOWN]:
        write(f"{change.page}.md: {change.query}: {change.before} -> {change.after}\n")
    if len(built.changed) > MAX_SHOWN:
        echo(f"and {len(built.changed) - MAX_SHOWN} more numbers changed")
    for page, why in built.unanswered[:MAX_SHOWN]:
        write(f"{page}.md: no answer: {why}\n")
    for page in built.kept[:MAX_SHOWN]:
        write(f"{page}.md: not written: its generated text was edited by hand. Try: --overwrite\n")
    done = f"{built.pages} pages of {built.runs} runs, {built.written} written, {built.removed} removed"
    echo(f"{done}: {folder.root}")
