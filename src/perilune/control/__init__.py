"""What was wanted and what was seen: experiments, runs, attempts, submission, reconciling."""
