"""`perilune serve --backend openvino` answers as the engine does, up to rounding."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from served import Direct, make_checkpoint, served

from perilune.engine.openvino_package import import_openvino

if find_spec("openvino") is None:
    pytest.skip("no OpenVINO: pip install openvino", allow_module_level=True)


@pytest.mark.slow
def test_openvino_server_computes_in_the_dtype_of_its_weights(tmp_path: Path) -> None:
    if "BF16" not in import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU does not compute in bfloat16")
    folder = make_checkpoint(tmp_path / "model")
    (expected,) = Direct.load(folder).sample("12+34=", 0, max_tokens=1, temperature=0.0)
    with (
        served(folder, "--backend", "openvino", "--dtype", "bfloat16", "--slots", "4") as server,
        server.client() as client,
    ):
        answer = client.completions.create(
            model=server.name, prompt="12+34=", max_tokens=1, temperature=0, logprobs=1
        )
    (logprob,) = answer.choices[0].logprobs.token_logprobs
    assert 1e-6 < abs(logprob - expected.logprobs[0]) < 0.05
