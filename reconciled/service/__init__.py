"""The service manager and logind: notifications, sockets, credentials, the delay lock, the unit."""
