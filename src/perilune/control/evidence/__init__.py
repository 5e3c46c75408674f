"""The evidence of attempts: stored, verified and removed."""
