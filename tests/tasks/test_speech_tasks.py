"""The speech stages: each consumes the output of the previous stage, and resume is exact."""

from pathlib import Path

import pytest
import torch
from task_cases import make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.errors import RequestError
from perilune.execution.placements.local import restore_outputs
from perilune.files import read_json_lines, sha256_file
from perilune.speech import espeak
from perilune.speech.folder import load_speech_model
from perilune.speech.prompt import Utterance
from perilune.speech.synthesis import Speaker
from perilune.tasks.speech.fitting import Fit
from perilune.tasks.speech.utterances import read_utterances
from perilune.tasks.speech.voice import voice_losses

UTTERANCES, FINAL = "artifacts/utterances", "artifacts/checkpoints/final"
FRAME = 1280


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Utterances of noise, because espeak-ng may be missing."""
    drawn = torch.Generator().manual_seed(0)

    def noise(text: str, **_: object) -> object:
        return (torch.randn(FRAME * len(text.split()), generator=drawn) * 0.1).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perilune.tasks.speech.utterances.synthesize_text", noise)
        return run_task(tmp_path_factory.mktemp("teacher") / "b", "utterances")


@pytest.fixture(scope="module")
def codec(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("codec") / "b"
    return run_task(root, "speech_codec", inputs={"data": teacher / UTTERANCES})


@pytest.fixture(scope="module")
def voice(teacher: Path, codec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = {"data": teacher / UTTERANCES, "codec": codec / FINAL}
    return run_task(tmp_path_factory.mktemp("voice") / "b", "speech_voice", inputs=inputs)


def test_utterances_are_split_by_text_and_normalized(teacher: Path) -> None:
    train = read_utterances(teacher / UTTERANCES, "train")
    held_out = read_utterances(teacher / UTTERANCES, "heldout")
    assert (len(train), len(held_out)) == (6, 3)
    assert not {spoken.text for spoken in train} & {spoken.text for spoken in held_out}
    assert all(len(spoken.samples) == FRAME * len(spoken.text.split()) for spoken in train)
    loudest = max(abs(spoken.samples).max() for spoken in [*train, *held_out])
    assert loudest == pytest.approx(0.7, abs=1e-3)
    with pytest.raises(RequestError, match="utterances"):
        read_utterances(teacher, "train")


@pytest.mark.parametrize("task", ["speech_codec", "speech_voice"])
def test_killed_speech_stage_resumes_exactly(
    task: str, teacher: Path, codec: Path, voice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, whole = {"data": teacher / UTTERANCES}, codec
    if task == "speech_voice":
        inputs, whole = {**inputs, "codec": codec / FINAL}, voice
    update = Fit.update

    def killed(self: Fit, loss: torch.Tensor, step: int) -> float:
        if step == 3:
            raise KeyboardInterrupt
        return update(self, loss, step)

    broken = make_bundle(tmp_path / "broken", make_job(task, inputs=inputs), inputs)
    monkeypatch.setattr(Fit, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        run_in(broken)
    monkeypatch.undo()
    again = make_bundle(tmp_path / "again", make_job(task, inputs=inputs), inputs)
    restore_outputs(broken / "artifacts", again / "artifacts")
    run_in(again)
    events = list(read_json_lines(again / "runtime/events.jsonl"))
    assert [event["step"] for event in events if event["kind"] == "resumed"] == [2]
    for name in ("artifacts/metrics.jsonl", f"{FINAL}/model.safetensors"):
        assert sha256_file(again / name) == sha256_file(whole / name)
    assert summary(again) == summary(whole)


def test_engine_reproduces_codes_that_the_voice_has_learned(voice: Path) -> None:
    model = load_speech_model(voice / FINAL)
    codes = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0], [2, 4, 6, 1], [3, 5, 1, 2]])
    optimizer = torch.optim.Adam(model.talker.parameters(), 2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = sum(voice_losses(model.talker, model.tokenizer, [("one two", codes)]))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05  # a code that is not the most likely adds at least log 2 / 12
    (spoken,) = Speaker(model).say([Utterance("one two")])
    assert torch.allclose(torch.from_numpy(spoken), model.codec(codes[None])[0], atol=1e-5)


def test_speech_evaluation_reports_word_error_rates_per_speaker(
    teacher: Path, voice: Path, tmp_path: Path
) -> None:
    inputs = {"data": teacher / UTTERANCES, "voice": voice / FINAL}
    heard = run_task(tmp_path / "b", "speech_evaluation", inputs=inputs)
    rates = summary(heard)["word_error_rates"]
    assert [*rates] == [f"digits, own words, {who}" for who in ("codec", "teacher", "voice")]
    rows = list(read_json_lines(heard / "artifacts/heard.jsonl"))
    for name, rate in rates.items():
        own = [row for row in rows if row["speaker"] == name.rsplit(", ", 1)[1]]
        assert rate["mean"] == sum(row["errors"] for row in own) / sum(row["words"] for row in own)
        assert rate["utterances"] == len(own) == 3
    assert len(metrics(heard)) == 1


def test_plan_warns_when_espeak_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from perilune.tasks.speech.stages import utterances

    job = make_job("utterances")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "espeak-ng is not installed here" in str(utterances.plan(job)["warning"])
    program = tmp_path / espeak.PROGRAM
    program.write_text("")
    program.chmod(0o755)
    assert "warning" not in utterances.plan(job)
