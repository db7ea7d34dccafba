"""Heartbeats between ranks, the diagnosis of a stuck job, and its termination."""
