"""What a training does with its time, and how well it uses its machines: the `Monitor`."""
