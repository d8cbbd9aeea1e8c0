"""The training service: sessions, models and futures over HTTP, in the wire format of the open `tinker` SDK."""
