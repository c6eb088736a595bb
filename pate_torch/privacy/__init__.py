"""Records, units, sensitive values, the budget that hands out noise, and the ledger that it charges."""
