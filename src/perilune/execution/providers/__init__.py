"""Who rents machines out: what is asked of them, and those we can ask."""
