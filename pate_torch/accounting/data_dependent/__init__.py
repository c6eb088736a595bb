"""Data-dependent costs, which are functions of private votes and stay with the data's owner unless noise is added."""
