"""Questions about a generated corpus of companies, their heads and cities."""
