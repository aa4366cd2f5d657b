"""Process groups, collectives and messages between ranks, and how lost ranks are noticed."""
