"""``reconciled journal``: list, show and resolve operations."""
