"""The house: figures of the code itself, and the rules that keep them."""
