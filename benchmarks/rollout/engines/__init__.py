"""One module an engine, imported in that engine's own environment.

Each has `prepare(checkpoint)`, which writes what the engine needs beside the checkpoint, and

    Adapter(checkpoint, dtype, threads, requests, **options)
        kv_cache, log_probs                       what they are, in words
        versions() -> {package: version}
        sample(requests, temperature, seed) -> Outcome

with temperature 1 or 0 (greedy). `requests` tells the adapter what the timed work will be.
"""
