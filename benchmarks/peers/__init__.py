"""Programs that train the same models on tfdist and on others, each in an environment of its own.

`start.py` runs one of them as a rank. None of the others imports tfdist, which is not installed
where they run: this folder is a package by itself there, so its modules import each other relatively.
"""
