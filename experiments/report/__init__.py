"""What came of it: results, claims, verdicts, pages, archives."""
