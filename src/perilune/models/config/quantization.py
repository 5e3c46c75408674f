"""The quantization of a published checkpoint, read from its config.json."""

from dataclasses import dataclass

from perilune.errors import RequestError
from perilune.models.config.reader import Reader

KEY = "quantization_config"
_METHODS = ("mxfp4", "fp8")


@dataclass(frozen=True, slots=True)
class Quantization:
    """A method of quantizing weights that Perilune undoes while it loads them.

    Attributes:
        method: "mxfp4" (gpt-oss) or "fp8" (DeepSeek-V3, Qwen3-FP8).
        block: rows and columns of a matrix that share a scale in fp8; None for one scale per matrix.
    """

    method: str
    block: tuple[int, int] | None = None


def read_quantization(read: Reader) -> Quantization | None:
    """Read the quantization of a checkpoint; None if its weights are not quantized.

    Raises:
        RequestError: when the section is malformed, or names a method that Perilune does not read.
    """
    if read.raw.get(KEY) is None:
        return None
    inner = read.inner(KEY)
    method = inner.raw.get("quant_method")
    if method not in _METHODS:
        raise RequestError(
            f"the weights are quantized with quant_method {method!r}, which Perilune does not read",
            where=inner.where,
            remedy="use the unquantized checkpoint, or one in mxfp4 or fp8."
            " To save memory in training, set lora.base to int8",
        )
    if method == "mxfp4":
        return Quantization(method)
    if inner.raw.get("fmt", "e4m3") != "e4m3":
        raise inner.wrong("fmt", "the implemented format is e4m3")
    block = inner.integers("weight_block_size")
    if len(block) not in {0, 2} or 0 in block:
        raise inner.wrong("weight_block_size", "give rows and columns, such as [128, 128]")
    return Quantization(method, (block[0], block[1]) if block else None)
