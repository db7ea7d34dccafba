"""The `Monitor`: how a training spends its time, and how well it uses its machines."""
