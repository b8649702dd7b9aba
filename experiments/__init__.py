"""All tables and figures of the papers, and the verdicts on their claims."""
