"""Results, claims, verdicts, pages, archives."""
