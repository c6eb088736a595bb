"""Private learning over hypothesis classes that are small enough to enumerate (NB20, DF20, WLF16).

Labels are binary. Neighbors differ in one replaced record, and the number of records is public. Every algorithm charges
the account before it draws noise, and returns the hypothesis or the predictions with the charged events.
"""
