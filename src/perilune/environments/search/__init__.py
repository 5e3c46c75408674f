"""Tasks that need a search in a corpus, from code or with single function calls."""
