"""Conversations and preferences as token rows: files, templates, labels, packing."""
