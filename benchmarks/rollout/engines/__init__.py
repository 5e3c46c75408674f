"""One module per engine, imported in the virtual environment of that engine.

Engines that do not read Hugging Face folders have `prepare(checkpoint)`, which writes their format beside the
checkpoint. Each has

    Adapter(checkpoint, dtype, threads, requests, **options)
        kv_cache, log_probs                       descriptions for the page
        versions() -> {package: version}
        sample(requests, temperature, seed) -> Outcome
        split(requests, seed) -> {part of a step: ms}      if the engine can measure them

with temperature 1 or 0 (greedy). `requests` are the requests of the timed work.
"""
