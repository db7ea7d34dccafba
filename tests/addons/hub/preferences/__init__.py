"""Losses of pairs and of sampled answers."""
