"""Invalid requests exit with code 2 and one clear message, and leave no files behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import RECIPE


def assert_refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """Assert exit code 2 and one message that contains every part of `said`."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1, done.stderr
    message = done.stderr[done.stderr.index("error: ") :]
    for part in said:
        assert part in message
    assert "Traceback" not in done.stderr
    assert len(message.splitlines()) <= 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("threads: 1", "thraeds: 1", ("small.yaml:9: resources.thraeds", "'threads'")),
        ("samples: 2", "samples: 0", ("small.yaml:12: stages.base.samples is 0", "greater than")),
        ("samples: 2", "samples: 1000000000", ("stages.base.samples is 1000000000", "less than")),
        ("id: reasoning_gym", "id: gym", ("small.yaml:4: environment.id: no environment called 'gym'",)),
        ("id: reasoning_gym", "id: gcd", ("no environment called 'gcd'", "try: reasoning_gym/gcd")),
        ("task: collect", "task: dpo", ("no task 'dpo' is installed", "try: task: preference")),
        ("task: basic_arithmetic", "task: basic_aritmetic", ("small.yaml:5: environment.task", "'basic_ari")),
        ("teacher: arithmetic", "teacher: arithmetik", ("stages.traces", "arithmetic")),
        ("stages:", "stages: [", ("small.yaml:11: not valid YAML",)),
    ],
)  # fmt: skip
def test_run_refuses_invalid_recipe(here, recipe: Path, old: str, new: str, said: tuple[str, ...]) -> None:
    recipe.write_text(RECIPE.replace(old, new))
    assert_refused(here("run", "small.yaml"), *said)
    assert [path.name for path in recipe.parent.iterdir()] == ["small.yaml"]  # no home either


def test_run_refuses_missing_recipe(perilune, tmp_path: Path) -> None:
    assert_refused(
        perilune("run", "quickstrat.yaml"),
        "quickstrat.yaml: no such recipe",
        "try: 'quickstart', which is bundled",
    )
    assert not list(tmp_path.iterdir())


def test_run_refuses_unknown_override(here, recipe: Path) -> None:
    assert_refused(here("run", "small.yaml", "--set", "base.sampels=3"), "--set base.sampels=3", "'samples'")


def test_run_refuses_unknown_option(here, recipe: Path) -> None:
    done = here("run", "small.yaml", "--sedd", "3")
    assert done.returncode == 2
    assert "--sedd" in done.stderr
    assert "Traceback" not in done.stderr


def test_data_inspect_refuses_row_that_breaks_the_schema(here, tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"messages": 3}\n')
    assert_refused(here("data", "inspect", "traces.jsonl"), "traces.jsonl:1")


def test_run_refuses_home_below_a_file(here, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    assert_refused(here("run", "small.yaml"), str(tmp_path / "home"), "PERILUNE_HOME")
    assert (tmp_path / "home").read_text() == "a file"


def mounted(options: str, *, home: Path) -> tuple[str, ...]:
    """Command prefix that mounts a tmpfs at `home`; skips the test if mounting is impossible."""
    unshare = shutil.which("unshare")
    home.mkdir()
    script = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    prefix = (
        unshare or "",
        "--mount",
        *(() if os.geteuid() == 0 else ("--map-root-user",)),
        "sh",
        "-c",
        script,
    )
    if (
        unshare is None
        or subprocess.run([*prefix, str(home), "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs a mount namespace: run as root, or allow unprivileged user namespaces")
    return (*prefix, str(home))


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system")
def test_run_refuses_read_only_home(perilune, light_recipe: Path, tmp_path: Path) -> None:
    done = perilune("run", "small.yaml", wrapper=mounted("ro", home=tmp_path / "home"))
    assert_refused(done, str(tmp_path / "home"), "PERILUNE_HOME", "Read-only")


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system")
@pytest.mark.parametrize("size", ["16k", "300k"])  # full before the database exists; before the bundle exists
def test_run_reports_full_disk(perilune, light_recipe: Path, tmp_path: Path, size: str) -> None:
    done = perilune("run", "small.yaml", wrapper=mounted(f"size={size}", home=tmp_path / "home"))
    assert_refused(done, str(tmp_path / "home"), "full")


def test_run_refuses_home_without_write_permission(perilune, light_recipe: Path, tmp_path: Path) -> None:
    wrapper: tuple[str, ...] = ()
    if os.geteuid() == 0:  # root can write everywhere unless it drops the capability
        if shutil.which("setpriv") is None:
            pytest.skip("as root this needs setpriv (util-linux)")
        wrapper = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--")
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    assert_refused(
        perilune("run", "small.yaml", wrapper=wrapper), str(home), "Permission denied", "PERILUNE_HOME"
    )
    assert not list(home.iterdir())


def test_missing_tensor_of_a_model_of_transformers_is_one_error(perilune, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    from perilune.models.text.tokenizer import Tokenizer

    sizes = {"vocab_size": 98, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.OPTConfig(**sizes, ffn_dim=16, word_embed_proj_dim=16)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    Tokenizer.characters().save(tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    tensors = load_file(weights)
    tensors["renamed"] = tensors.pop("model.decoder.final_layer_norm.weight")
    save_file(tensors, weights, {"format": "pt"})
    done = perilune("chat", "model", "--plain")
    what, remedy = done.stderr.splitlines()
    assert what == "error: model: tensor model.decoder.final_layer_norm.weight is missing"
    assert remedy == "  try: fetch the folder again, with the config.json of these weights"


def test_plan_says_that_it_waits_for_tasks(
    here, light_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom perilune.environments import SingleTurn\n"
        "class Slow(SingleTurn):\n"
        "    def __init__(self, spec): self.id = 'slow'\n"
        "    def tasks(self, split, seed): time.sleep(1); raise ValueError('none')\n"
        "    def score(self, task, transcript): ...\n"
    )
    monkeypatch.setattr("perilune.cli.output.SLOW_SECONDS", 0.2)
    done = here("run", "small.yaml", "--set", "environment={id: 'slow.py:Slow'}", "--plan")
    assert done.stderr.startswith(
        "still checking the recipe and the tasks of its environment; Ctrl-C stops\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("quickstart", "--seed", "x"), "'--seed': 'x' should be a valid integer"),
        (("wait", "rl", "--timeout", "-1"), "'--timeout': '-1' should be greater than or equal to 0"),
    ],
)
def test_usage_errors_state_the_wrong_value(here, arguments: tuple[str, ...], said: str) -> None:
    assert here(*arguments).stderr.splitlines()[-1] == f"Error: Invalid value for {said}"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder that takes no files")
@pytest.mark.parametrize(
    "command",
    [
        "simulate quickstart --trace",
        "simulate quickstart --page",
        "simulate-serving tiny --requests none.jsonl --machines 1xL4 --page",
        "report rl --out",
        "compare rl --out",
        "track rl --to tensorboard --out",
        "model card tiny --svg",
        "model gallery --out",
        "model gallery --markdown",
        "environments audit calculator --out",
        "traces export rl --out",
        "traces suite rl --out",
        "data filter none.jsonl --out",
        "data convert none.jsonl --to records --out",
        "data generate calculator --out",
        "artifacts pull rl --out",
        "lab --keep",
        "export rl --out",
        "bundle freeze small.yaml --stage rl --out",
    ],
)
def test_command_refuses_unwritable_output_before_its_work(here, tmp_path: Path, command: str) -> None:
    option = command.rsplit(maxsplit=1)[-1]
    assert_refused(here(*command.split(), "/proc/x/y"), f"error: {option}: cannot write /proc/x/y", "try: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder that takes no files")
@pytest.mark.parametrize(
    ("command", "name", "metavar"),
    [
        ("backup", "/proc/x/y", "FOLDER"),
        ("model export rl", "/proc/x/y", "OUT"),
        ("model export rl", "/proc/x/y.gguf", "OUT"),
    ],
)
def test_command_refuses_unwritable_argument_before_its_work(
    here, tmp_path: Path, command: str, name: str, metavar: str
) -> None:
    assert_refused(here(*command.split(), name), f"error: {metavar}: cannot write {name}", "try: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".", "pipe"])
def test_command_refuses_output_that_is_no_file(here, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = here("simulate", "quickstart", "--trace", name)
    assert_refused(done, f"error: --trace: {name} is no regular file")


def test_output_may_go_to_a_folder_that_does_not_exist_yet(here, tmp_path: Path) -> None:
    assert here("model", "gallery", "--out", "new/folder/page.html").returncode == 0
    assert (tmp_path / "new/folder/page.html").is_file()
