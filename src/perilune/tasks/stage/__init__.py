"""What every stage does: load the policy, set up an engine, train, save, publish weights."""
