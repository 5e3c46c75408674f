"""Questions about runs: lookup, explanation and forecast. Nothing here changes the record."""
