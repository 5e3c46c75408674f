"""What an episode is worth, judged in a process of its own."""
