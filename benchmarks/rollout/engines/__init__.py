"""One module an engine, imported in that engine's own environment.

Those that do not read Hugging Face folders have `prepare(checkpoint)`, which writes what they need beside the
checkpoint. Each has

    Adapter(checkpoint, dtype, threads, requests, **options)
        kv_cache, log_probs                       what they are, in words
        versions() -> {package: version}
        sample(requests, temperature, seed) -> Outcome
        split(requests, seed) -> {part of a step: ms}      if it can tell

with temperature 1 or 0 (greedy). `requests` tells the adapter what the timed work will be.
"""
