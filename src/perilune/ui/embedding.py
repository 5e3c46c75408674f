"""JSON that is safe inside a script element, whatever its strings contain."""

import json
import re
from typing import Any

# In JSON these characters occur only inside strings, where an escape is equivalent.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")  # lone surrogates, which UTF-8 cannot encode


def embeddable_json(value: Any) -> str:
    """Return `value` as compact JSON in which no string can end the script element or start another.

    Raises:
        ValueError: for NaN or infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _LONE_SURROGATES.sub("\ufffd", text).translate(_ESCAPES)
