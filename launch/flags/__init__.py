"""The flags of the programs by subject, and the framework of a program."""
