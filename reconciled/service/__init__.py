"""The service manager and the host: what the daemon tells them, and what it asks of them."""
