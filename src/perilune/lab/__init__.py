"""A laboratory of failures: short runs on the fake cloud, in a weather of choice, and what became of them."""
