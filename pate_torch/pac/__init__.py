"""Private learning over hypothesis classes small enough to enumerate (NB20, DF20, WLF16): exact reference algorithms.

Binary labels; replace-one adjacency with a public number of records (``selection`` takes either). Every function
charges (``charge``) before it draws, and returns its answer together with the events it incurred.
"""
