"""`perilune chat`: chat with a checkpoint in the terminal, or through stdin."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import CheckpointArgument, find_checkpoint
from perilune.cli.output import echo, write
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.engine.engine import Engine
    from perilune.models.text.tokenizer import Tokenizer

ADAPTER = "adapter"  # name of the one adapter in the engine
COMMANDS = "/reset, /system TEXT, /quit"


def chat(
    checkpoint: CheckpointArgument,
    *,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer in tokens.")] = 512,
    adapter: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A LoRA adapter in PEFT's format.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Jinja file that replaces the chat template.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Use no chat template: join the messages as plain text.")
    ] = False,
    separate: Annotated[
        bool, typer.Option("--separate", help="Answer each message on its own, as after /reset.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed that selects the samples.")] = 0,
) -> None:
    """Chat with a checkpoint. Answers are streamed; Ctrl-C stops an answer.

    /reset forgets the conversation, /system TEXT sets the system message, /quit ends the chat. Without a
    terminal, each line of stdin is one message, and the answers go to stdout. All messages form one
    conversation. With --separate, each message starts a new conversation, and a message that cannot be
    answered is reported on stderr without stopping the following messages.

    \b
    perilune chat quickstart/rl --plain
    perilune chat ./my-model --adapter ./lora --temperature 0.7
    echo "What is 17 + 25?" | perilune chat ./my-model --max-tokens 64
    perilune chat words/sft --plain --separate < questions.txt
    """
    if plain and chat_template is not None:
        raise RequestError("--plain and --chat-template exclude each other")
    from rich.console import Console

    folder = find_checkpoint(checkpoint)
    with Console(stderr=True).status(f"Loading {checkpoint}"):
        conversation = _open_conversation(folder, adapter, chat_template, plain=plain)
    conversation.temperature, conversation.max_tokens, conversation.seed = temperature, max_tokens, seed
    interactive = sys.stdin.isatty()
    if interactive:
        echo(f"{checkpoint}: {COMMANDS}; Ctrl-C stops an answer", err=True)
    failed = False
    for number, line in enumerate(_read_lines(interactive=interactive), start=1):
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            break
        if separate:
            conversation.messages.clear()
        try:
            _handle_line(conversation, command, rest.strip(), line)
        except RequestError as error:
            if not interactive and not separate:
                raise
            failed = not interactive
            echo(f"error: {f'line {number}: ' if failed else ''}{error}", err=True)
    if failed:
        raise typer.Exit(RequestError.exit_code)


def _handle_line(conversation: Conversation, command: str, rest: str, line: str) -> None:
    if command == "/reset":
        conversation.messages.clear()
    elif command == "/system":
        conversation.system = rest
    elif command.startswith("/"):
        raise RequestError(f"unknown command '{command}'", remedy=COMMANDS)
    elif line.strip():
        with _collect_interrupts() as interrupted, closing(conversation.answer(line)) as pieces:
            for text in pieces:
                write(text)
                if interrupted:
                    break
        write("\n")


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...], adapter: bool):
        self.messages: list[dict[str, str]] = []
        self.system = ""
        self.temperature, self.max_tokens, self.seed = 1.0, 512, 0
        self._engine, self._tokenizer, self._stop = engine, tokenizer, stop_token_ids
        self._adapter = ADAPTER if adapter else None

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to a message in pieces. The conversation keeps an answer that is read in part.

        Raises:
            RequestError: when the conversation is too long, or the template refuses it. Drops the message.
        """
        from perilune.engine.request import Request, SamplingParams

        message = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        token_ids = self._tokenizer.encode_prompt([*system, *self.messages, message])
        room = self._engine.positions - len(token_ids)
        if room < 1:
            raise RequestError(
                f"the conversation has {len(token_ids)} tokens, and the model has only"
                f" {self._engine.positions} positions",
                remedy="/reset, or a shorter message",
            )
        params = SamplingParams(min(self.max_tokens, room), self.temperature, self._stop)
        key = (self.seed, len(self.messages), 0)
        pieces: list[str] = []
        try:
            for delta in self._engine.stream(Request(token_ids, params, key, adapter=self._adapter)):
                pieces.append(delta.text)
                yield delta.text
        finally:
            self.messages += [message, {"role": "assistant", "content": "".join(pieces)}]


def _open_conversation(
    folder: Path, adapter: Path | None, template: Path | None, *, plain: bool
) -> Conversation:
    import torch

    from perilune.engine.engine import Engine
    from perilune.engine.speculation import SpeculationSettings
    from perilune.files import read_regular
    from perilune.models.adapters.files import Adapter
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.models.transformers_model import TransformersModel, load_for_inference

    if template is None and not plain and Tokenizer.load(folder).chat_template is None:
        raise RequestError(
            "the checkpoint has no chat template",
            where=str(folder),
            remedy="--chat-template FILE, or --plain to join the messages as plain text",
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_for_inference(folder, device)
    if plain:
        tokenizer = tokenizer.with_chat_template(None, where=str(folder))
    elif template is not None:
        text = read_regular(template).decode("utf-8", "replace")
        tokenizer = tokenizer.with_chat_template(text, where=str(template))
    if isinstance(model, TransformersModel):
        echo(model.notice, err=True)
    engine = Engine(model, slots=1, tokenizer=tokenizer)
    if engine.speculates_exactly:
        engine.speculate(SpeculationSettings("lookup"))
    if adapter is not None:
        engine.add_adapter(ADAPTER, Adapter.load(adapter.expanduser()))
    ends = dict.fromkeys((*model.config.eos_token_ids, tokenizer.eos_token_id))
    stop = tuple(end for end in ends if end < model.config.vocab_size)
    return Conversation(engine, tokenizer, stop, adapter is not None)


def _read_lines(*, interactive: bool) -> Iterator[str]:
    """Yield lines of stdin; in a terminal after a prompt, with editing and history."""
    if not interactive:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  # gives input() editing and history

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:  # discards the line
            echo("")
        except EOFError:
            echo("")
            return


@contextmanager
def _collect_interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C in the list instead of raising it, so that a step of the engine always completes."""
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        caught.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
