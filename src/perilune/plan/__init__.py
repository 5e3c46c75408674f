"""What is known of a recipe before it runs: errors, lengths of episodes, time, memory, a simulation."""
