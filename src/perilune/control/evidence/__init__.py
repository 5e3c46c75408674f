"""Evidence: what attempts leave behind, stored, verified and removed."""
