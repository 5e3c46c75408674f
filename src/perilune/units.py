"""Numbers with their units, as commands print them."""


def format_count(value: float) -> str:
    """Format a number of parameters: 596.0 million."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:,.0f}"


def format_flops(value: float) -> str:
    """Format floating-point operations: 1.2 GFLOP."""
    for unit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.1f} {letter}FLOP"
    return f"{value:,.0f} FLOP"


def format_size(value: float) -> str:
    """Format bytes with a binary unit: 112.0 KiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{value / (1 << power):.1f} {unit}"
    return f"{value:.0f} B"


def format_tokens(value: float) -> str:
    """Format a number of tokens: 32k."""
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Format seconds as "m:ss" or "h:mm:ss"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
