"""Commands that take a checkpoint folder or a run: `perilune eval`, `probe` and `chat`."""

import io
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import typer
from cli_cases import SCRIPT, environment

from perilune.cli.inspect import chat as chatting
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.errors import RequestError
from perilune.models.checkpoints.loading import load_checkpoint, new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.text.tokenizer import Tokenizer

CALCULATOR = ("--environment", "calculator")
SMALL = ("--tasks", "3", "--samples", "2", "--max-tokens", "4")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.characters().with_chat_template(TEMPLATE, where="test")
    save_checkpoint(folder, new_model(PRESETS["tiny"], tokenizer, seed=0), tokenizer)
    return folder


def test_eval_makes_a_run_with_a_bundle_and_reuses_its_result(perilune, here, model: Path) -> None:
    command = ("eval", str(model), *CALCULATOR, *SMALL)
    done = perilune(*command, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    (evaluation,) = document["evaluations"]
    assert evaluation["stage"] == "evaluation" and evaluation["tasks"] == 3
    assert set(evaluation["pass@1"]) == {"mean", "low", "high"}
    (stage,) = document["stages"]
    assert stage["state"] == "succeeded"
    assert here("bundle", "verify", document["bundles"]["evaluation"]).returncode == 0

    again = here(*command)
    assert again.returncode == 0
    assert "held-out tasks" in again.stdout and "pass@1" in again.stdout
    assert document["bundles"]["evaluation"] in again.stdout  # the result is reused
    assert f"perilune eval {model} --environment calculator" in again.stdout  # next steps repeat the command

    refused = here("eval", stage["run"], *CALCULATOR)
    assert refused.returncode == 2
    assert "a run of evaluate makes no checkpoint" in refused.stderr


def test_eval_says_that_it_waits_for_tasks(
    here, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom perilune.environments import SingleTurn\n"
        "class Slow(SingleTurn):\n"
        "    def __init__(self, spec): self.id = 'slow'\n"
        "    def tasks(self, split, seed): time.sleep(1); raise ValueError('none')\n"
        "    def score(self, task, transcript): ...\n"
    )
    monkeypatch.setattr("perilune.cli.output.SLOW_SECONDS", 0.2)
    for command in ("eval", "probe"):
        assert "still checking the recipe" in here(command, str(model), "-e", "slow.py:Slow").stderr


@pytest.mark.thorough
def test_probe_evaluates_each_environment_and_reuses_results(perilune, here, model: Path) -> None:
    command = ("probe", str(model), "-e", "calculator", "-e", "reasoning_gym/nope", *SMALL)
    done = here(*command, "--json")
    assert done.returncode == 1 and "1 of 2 environments could not be evaluated" in done.stderr
    document = json.loads(done.stdout)
    (row,) = document["environments"]
    assert row["environment"] == "calculator" and row["k"] == 2
    assert row["live"]["mean"] == 0 and row["live"]["high"] > 0.5
    assert row["verdict"].startswith("SFT first") and "0 of 6 answers passed" in row["verdict"]
    assert "nope" in document["failures"]["reasoning_gym/nope"]

    again = here(*command)
    assert "live groups" in again.stdout and "SFT first" in again.stdout
    assert row["run"] in again.stderr and "finished before" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("eval", "./none", *CALCULATOR), "no file or folder"),
        (
            ("eval", "none", *CALCULATOR),
            "no run is called 'none', and there is no folder",
        ),
        (("eval", "models/none", *CALCULATOR), "and there is no folder or fetched model models/none"),
        (("eval", "MODEL", "--environment", "calculatr"), "calculatr"),
        (("eval", "MODEL", *CALCULATOR, "--set", "speed=2"), "speed"),
        (("eval", "MODEL", *CALCULATOR, "--tasks", "0"), "--tasks"),
        (("eval", "MODEL"), "--environment"),
    ],
)
def test_eval_refuses_invalid_arguments(here, model: Path, arguments, said: str) -> None:
    done = here(*(str(model) if part == "MODEL" else part for part in arguments))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_eval_refuses_a_file_that_is_no_model(here, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "model.safetensors: is not a model" in here("eval", "model.safetensors", *CALCULATOR).stderr


def run_chat(tmp_path: Path, said: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "chat", *arguments], input=said, cwd=tmp_path, env=environment(tmp_path / "home"),
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_chat_answers_stdin_lines_and_keeps_history_until_reset(tmp_path: Path, model: Path) -> None:
    lines = ["hello", "hello", "/reset", "hello", "/system be brief", "/reset", "hello", "/quit", "unread"]
    command = (str(model), "--max-tokens", "6", "--temperature", "0")
    done = run_chat(tmp_path, "\n".join(lines) + "\n", *command)
    assert done.returncode == 0, done.stderr
    decoder, tokenizer = load_checkpoint(model)
    engine = Engine(decoder, tokenizer=tokenizer)

    def answer(*messages: dict[str, str]) -> str:
        prompt = Prompt(tokenizer.encode_prompt(messages), (0, 0, 0))
        (sample,) = engine.sample([prompt], 1, SamplingParams(6, 0.0, (tokenizer.eos_token_id,)))[0]
        return tokenizer.decode(sample.token_ids)

    user = {"role": "user", "content": "hello"}
    first = answer(user)
    second = answer(user, {"role": "assistant", "content": first}, user)
    system = answer({"role": "system", "content": "be brief"}, user)
    assert done.stdout == "".join(f"{text}\n" for text in (first, second, first, system))


def test_plain_chat_ignores_the_template(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    for folder in (model, bare):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\nhello\n"))
        chatting.chat(str(folder), max_tokens=6, temperature=0.0, plain=True)
    text = capsys.readouterr().out
    assert text == text[: len(text) // 2] * 2 and text
    with pytest.raises(RequestError, match="exclude each other"):
        chatting.chat(str(model), plain=True, chat_template=model / "chat_template.jinja")


def test_chat_separate_reports_refused_line_and_answers_the_others(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello\n{'x' * 20_000}\nhello\n"))
    with pytest.raises(typer.Exit) as left:
        chatting.chat(str(model), max_tokens=6, temperature=0.0, separate=True)
    out, err = capsys.readouterr()
    assert left.value.exit_code == 2 and "error: line 2: the conversation has" in err
    assert out == out[: len(out) // 2] * 2 and out


def test_chat_separate_answers_each_line_without_history(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nhello\n"))
    chatting.chat(str(model), max_tokens=6, temperature=0.0, separate=True)
    text = capsys.readouterr().out
    assert text == text[: len(text) // 2] * 2 and text


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(tmp_path: Path, model: Path) -> None:
    chat = subprocess.Popen(
        [SCRIPT, "chat", str(model), "--max-tokens", "100000", "--temperature", "0"],
        cwd=tmp_path, env=environment(tmp_path / "home"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert chat.stdin is not None and chat.stdout is not None
    try:
        chat.stdin.write(b"tell me everything\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)  # the answer has begun
        chat.send_signal(signal.SIGINT)
        chat.stdin.write(b"/quit\n")
        chat.stdin.close()
        assert chat.wait(timeout=120) == 0
        assert len(chat.stdout.read()) < 3000  # the model would fill its 4,096 positions
    finally:
        chat.kill()
        chat.stdout.close()


def test_chat_without_template_suggests_plain(tmp_path: Path, model: Path, here) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink()
    refused = here("chat", "bare/")
    assert refused.returncode == 2
    assert "has no chat template" in refused.stderr and "--plain" in refused.stderr
    done = run_chat(tmp_path, "hello\n/resett\n", "./bare", "--plain", "--max-tokens", "3")
    assert done.returncode == 2 and "unknown command '/resett'" in done.stderr
    assert done.stdout.endswith("\n")  # the first line was answered
