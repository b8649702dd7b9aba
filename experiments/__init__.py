"""Every table and figure of the papers, and the ledger of their claims."""
