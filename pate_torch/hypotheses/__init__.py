"""Private learning over hypothesis classes that are small enough to enumerate (NB20, DF20, WLF16).

Labels are binary. Neighbors differ in one replaced record, and the number of records is public. Every algorithm charges
its budget before it draws, and returns its answer together with the events that it incurred.
"""
